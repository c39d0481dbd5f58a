"""The time of a step: what hides behind compute, and what must hold of every cluster."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liger_trainer.plan.estimate import estimate
from liger_trainer.plan.settings import Setting, candidates, splits
from liger_trainer.plan.speed import LAUNCH_SECONDS, step_time
from liger_trainer.plan.traffic import traffic
from tests.plan.cases import cluster, run_of

RUN = run_of("llama3-8b", 4096)
MIXTURE = run_of("qwen3-30b-a3b", 4096, layers=12)
WAYS = list(
    candidates(splits(32, 4, parts=(2, 8), matrices=(2, 8)), batch=2, accumulation=2, tiles=True),
)
MIXTURE_WAYS = list(candidates(splits(32, 4, experts=128), batch=1, accumulation=2, tiles=False))
SHARDED = [way for way in splits(32, 4, parts=(4,), matrices=(4,)) if way.sharded and way.replicas == 1]

settings = st.one_of(
    st.sampled_from(WAYS).map(lambda way: (RUN, way)), st.sampled_from(MIXTURE_WAYS).map(lambda way: (MIXTURE, way))
)
rates = st.floats(1e8, 1e12)


@given(settings, rates, st.floats(1, 1000))
def test_a_faster_network_is_never_slower(case, rate, faster):
    run, setting = case
    slow = cluster(32, 4, network=(rate, False))
    quick = dataclasses.replace(slow, network=slow.network * faster)
    assert step_time(run, setting, quick).token <= step_time(run, setting, slow).token * (1 + 1e-9)
    quick = dataclasses.replace(slow, link=slow.link * faster)
    assert step_time(run, setting, quick).token <= step_time(run, setting, slow).token * (1 + 1e-9)


@given(settings, rates)
def test_what_waits_is_a_part_of_the_messages(case, rate):
    run, setting = case
    found = step_time(run, setting, cluster(32, 4, network=(rate, True)))
    assert 0 <= found.waiting <= found.sent.seconds * (1 + 1e-9)
    assert 0 <= found.hidden <= 1
    assert found.computing > setting.accumulation * LAUNCH_SECONDS
    assert found.tokens == pytest.approx(setting.batch * setting.accumulation * 4096 / setting.sharing)


@given(st.sampled_from(SHARDED), st.integers(1, 4), st.sampled_from([2, 3, 4, 16]))
def test_more_hosts_never_need_more_memory_under_full_sharding(way, batch, more):
    few = dataclasses.replace(way, batch=batch)
    assert estimate(RUN, dataclasses.replace(few, gpus=few.gpus * more)).total <= estimate(RUN, few).total


@given(st.integers(2, 6), st.integers(1, 4))
def test_more_copies_take_more_memory_and_send_less_between_hosts(power, batch):
    gpus, hosts = 8 * 2**power, 2**power
    setting = Setting("fsdp2", gpus, batch)
    copies = dataclasses.replace(setting, replicas=hosts)
    assert estimate(RUN, copies).total > estimate(RUN, setting).total
    found = [step_time(RUN, one, cluster(gpus, hosts, network=(1e9, False))).sent for one in (copies, setting)]
    assert found[0].between < found[1].between


def test_a_layer_takes_the_longer_of_its_compute_and_its_messages():
    """With a fast network only both ends of a pass wait; with a slow one everything does, less what layers compute."""
    setting, layers = Setting("fsdp2", 16, 8), RUN.parameters.layers
    quick, slow = cluster(16, 2, network=(1e12, False)), cluster(16, 2, network=(1e8, False))
    ends, all_of_it = traffic(RUN, setting, quick), traffic(RUN, setting, slow)
    found = step_time(RUN, setting, quick)
    root = 2 * ends.root_gather.seconds + ends.root_reduce.seconds
    assert found.waiting == pytest.approx(2 * ends.gather.seconds + ends.reduce.seconds + root)
    late = step_time(RUN, setting, slow)
    hidden = all_of_it.step(layers, 1).seconds - late.waiting
    assert late.computing == found.computing
    assert 0 < hidden < found.computing
    compute = found.computing - step_time(RUN, Setting("fsdp2", 16, 4), quick).computing  # of 4 of the 8 sequences
    head = 2 * compute * 0.07  # 525 of 7,505 million weights, and attention
    assert hidden == pytest.approx((2 * compute - head) * (layers - 1) / layers, rel=0.04)


def test_activations_are_waited_for():
    """Where every layer hides its weights, twice the tokens wait for the rows of as many more."""
    setting = Setting("expert_parallel", 8, 32, expert_parallel_size=8)
    rows = traffic(MIXTURE, setting, cluster(8)).activations
    waiting = [step_time(MIXTURE, dataclasses.replace(setting, batch=size), cluster(8)).waiting for size in (32, 64)]
    assert waiting[1] - waiting[0] == pytest.approx(rows.within / cluster(8).link)
    assert rows.within == 5 * 12 * 32 * 4096 * 8 * 2048 * 2 * 7 / 8


def test_options_cost_time():
    def token(rank=0, **setting):
        return step_time(run_of("llama3-8b", 4096, rank=rank), Setting(**setting), cluster()).token

    for rank in (0, 16):
        assert token(rank, checkpointing=False) < token(rank) < token(rank, tiled_mlp=True)
        assert token(rank) < token(rank, offloading=0.5) < token(rank, offloading=1.0)


def test_every_forward_without_gradients_takes_as_long_as_the_one_with():
    """And under FSDP2 gathers each layer once more."""
    few, setting = dataclasses.replace(RUN.work, scored=1), Setting("fsdp2", 8, 8)
    with_one, with_two, without = (
        step_time(dataclasses.replace(RUN, work=work), setting, cluster(8))
        for work in (few, dataclasses.replace(few, scored=2), RUN.work)
    )
    assert with_two.computing - with_one.computing == pytest.approx(with_one.computing - without.computing)
    assert 0.2 < with_one.computing / without.computing - 1 < 0.3
    assert with_one.sent.within - without.sent.within == pytest.approx(2 * 8_030_261_248 * 7 / 8)
    assert without.waiting < with_one.waiting < with_two.waiting
    rows = [
        traffic(
            dataclasses.replace(MIXTURE, work=work), Setting("expert_parallel", 8, expert_parallel_size=8), cluster(8)
        )
        for work in (few, RUN.work)
    ]
    assert rows[0].activations.within == pytest.approx(rows[1].activations.within * 7 / 5)


def test_experts_cost_more_to_send_than_they_compute():
    def overhead(run):
        alone, split = (step_time(run, setting, cluster(setting.gpus)).token for setting in (Setting(), FSDP2))
        return split / alone

    FSDP2 = Setting("fsdp2", 8)
    assert overhead(MIXTURE) > 1.2 > overhead(RUN)


def test_hosts_of_one_gpu_send_everything_over_the_network():
    sent = step_time(RUN, Setting("fsdp2", 4), cluster(4, 4)).sent
    assert sent.within == 0
    assert sent.between == pytest.approx(3 * 2 * 8_030_261_248 * 3 / 4)
