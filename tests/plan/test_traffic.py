"""Bytes of a step against closed forms that are written out here, and the time of a ring."""

import dataclasses
import itertools
from collections import Counter

import pytest

from liger_trainer.plan.cluster import NETWORK_STEP, Cluster
from liger_trainer.plan.settings import Setting
from liger_trainer.plan.traffic import traffic
from tests.plan.cases import cluster, run_of

RUN = run_of("llama3-8b", 4096)
PARAMETERS, LAYERS, HIDDEN, KEYS = 8_030_261_248, 32, 4096, 1024
WHOLE = 2 * PARAMETERS  # bytes in bf16


def sent(setting, hosts=1, run=RUN):
    """Bytes of a step within a host and between hosts."""
    found = traffic(run, setting, cluster(setting.gpus, hosts)).step(run.parameters.layers, setting.accumulation)
    return found.within, found.between


def test_fsdp2_gathers_twice_and_reduces_once():
    assert RUN.parameters.total.elements == PARAMETERS
    assert sent(Setting("fsdp2", 8)) == pytest.approx((3 * WHOLE * 7 / 8, 0))


def test_weights_are_gathered_for_each_micro_batch_and_gradients_reduced_once():
    assert sent(Setting("fsdp2", 8, accumulation=4))[0] == pytest.approx((2 * 4 + 1) * WHOLE * 7 / 8)
    each = dataclasses.replace(RUN, sync_each_batch=True)
    assert sent(Setting("fsdp2", 8, accumulation=4), run=each)[0] == pytest.approx((2 * 4 + 4) * WHOLE * 7 / 8)


def test_a_ring_over_hosts_crosses_once_for_all_gpus_of_a_host():
    within, between = sent(Setting("fsdp2", 16), hosts=2)
    assert within + between == pytest.approx(3 * WHOLE * 15 / 16)
    assert between == pytest.approx(3 * WHOLE * 15 / 16 / 8)


@pytest.mark.parametrize(
    ("gpus", "hosts", "size", "stride", "expected"),
    [
        (16, 2, 4, 1, (1, 4)),
        (16, 2, 16, 1, (2, 8)),
        (64, 8, 8, 8, (8, 1)),
        (6, 2, 2, 1, (2, 1)),  # ranks 2 and 3 are in two hosts of three GPUs
        (6, 2, 3, 2, (2, 1)),  # 0, 2 and 4
        (12, 4, 4, 1, (2, 1)),
        (12, 2, 4, 1, (2, 2)),  # 4 to 7
        (12, 2, 3, 4, (2, 1)),
        (512, 64, 512, 1, (64, 8)),
    ],
)
def test_the_group_that_is_spread_most_counts(gpus, hosts, size, stride, expected):
    each = gpus // hosts
    groups = [
        [block * size * stride + offset + stride * place for place in range(size)]
        for block in range(gpus // (size * stride))
        for offset in range(stride)
    ]
    assert sorted(itertools.chain(*groups)) == [*range(gpus)]
    spread = [Counter(rank // each for rank in ranks) for ranks in groups]
    assert max(map(len, spread)) == expected[0]
    found = cluster(gpus, hosts).group(size, stride)
    assert (found.size, found.hosts, found.each) == (size, *expected)


def test_parts_of_a_sequence_in_two_hosts_cross_the_network():
    run = run_of("llama3-8b", 16384)
    inside, across = (sent(Setting("fsdp2", 12, sequence_parts=2), hosts, run)[1] for hosts in (2, 4))
    alone = [sent(Setting("fsdp2", 12), hosts, run)[1] for hosts in (2, 4)]
    assert inside < 1.5 * alone[0]
    assert across > alone[1] + 1e9


@pytest.mark.parametrize("card", ["L40S", "L4", "A10", "RTX 4090"])
def test_cards_whose_hosts_have_no_network_of_their_own_send_within_one(card):
    found = cluster(4, card=card)
    assert found.gather(1e9, found.group(4)).seconds > 0
    assert found.exchange(1e9, found.group(4)).seconds > 0


def test_copies_are_gathered_in_their_host_and_only_shards_are_summed_between():
    within, between = sent(Setting("fsdp2", 64, replicas=8), hosts=8)
    assert within == pytest.approx(3 * WHOLE * 7 / 8)
    assert between == pytest.approx(2 * (WHOLE / 8) * 7 / 8)


def test_ddp_sums_gradients_once():
    assert sent(Setting("ddp", 4, accumulation=3))[0] == pytest.approx(2 * WHOLE * 3 / 4)
    assert sent(Setting()) == (0, 0)


def test_zero2_reduces_every_micro_batch_and_gathers_new_weights():
    assert sent(Setting("zero2", 4, accumulation=3))[0] == pytest.approx((3 + 1) * WHOLE * 3 / 4)


def test_frozen_weights_are_gathered_and_get_no_gradients():
    run = run_of("llama3-8b", 4096, rank=16)
    trained = run.parameters.total.trained
    expected = 2 * (WHOLE + 2 * trained) + 2 * trained
    assert sent(Setting("fsdp2", 8), run=run)[0] == pytest.approx(expected * 7 / 8)


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 4), (True, 6)])
def test_matrices_that_are_shared_sum_the_states_of_every_layer(checkpointing, times):
    setting = Setting("tensor_parallel", 8, 2, checkpointing=checkpointing, tensor_parallel_size=4)
    states = 2 * 4096 * HIDDEN * 2
    sums = (times * LAYERS + 2) * 2 * states * 3 / 4
    weights = 3 * (WHOLE / 4) * 1 / 2  # between the 2 GPUs that have the same quarter
    assert sent(setting)[0] == pytest.approx(sums + weights)


@pytest.mark.parametrize(("checkpointing", "times"), [(False, 3), (True, 4)])
def test_gpus_that_share_sequences_gather_keys_and_values(checkpointing, times):
    setting = Setting("fsdp2", 8, checkpointing=checkpointing, sequence_parts=4)
    whole = 2 * 4096 * KEYS * 2
    assert sent(setting)[0] == pytest.approx(3 * WHOLE * 7 / 8 + times * LAYERS * whole * 3 / 4)


def test_experts_are_gathered_among_the_gpus_that_have_the_same():
    run = run_of("qwen3-30b-a3b", 4096, layers=12)
    total, experts = run.parameters.total.elements, run.parameters.groups["experts"].elements
    setting = Setting("expert_parallel", 8, expert_parallel_size=4)
    rows = 4096 * 8 * 2048 * 2
    expected = 3 * 2 * (total - experts) * 7 / 8 + 3 * 2 * (experts / 4) * 1 / 2 + 5 * 12 * rows * 3 / 4
    assert sent(setting, run=run)[0] == pytest.approx(expected)


HOSTS = Cluster(gpus=16, hosts=4, flops=1.0, memory=1.0, link=200e9, network=10e9, link_step=1e-6)


def test_the_time_of_a_ring():
    """Four GPUs of each host share what crosses to the next one, at four times the rate of one."""
    every = HOSTS.gather(16e9, HOSTS.group(16))
    assert every.seconds == pytest.approx(15e9 / 4 / 10e9 + 12e-6 + 3 * NETWORK_STEP)
    inside = HOSTS.gather(16e9, HOSTS.group(4))
    assert (inside.within, inside.between) == (12e9, 0)
    assert inside.seconds == pytest.approx(12e9 / 200e9 + 3e-6)
    alone = HOSTS.gather(16e9, HOSTS.group(4, stride=4))
    assert (alone.within, alone.between) == (0, 12e9)
    assert alone.seconds == pytest.approx(1.2 + 3 * NETWORK_STEP)
    assert HOSTS.all_reduce(16e9, HOSTS.group(4)) == inside * 2


def test_a_link_that_is_slower_than_all_network_cards_of_a_host():
    slow = dataclasses.replace(HOSTS, link=1e9)
    assert slow.gather(16e9, slow.group(16)).seconds == pytest.approx(15e9 * 3 / 4 / 1e9, rel=1e-3)


def test_an_exchange_between_hosts():
    found = HOSTS.exchange(16e9, HOSTS.group(16))
    assert (found.within, found.between) == (3e9, 12e9)
    assert found.seconds == pytest.approx(1.2 + NETWORK_STEP)
    assert HOSTS.exchange(16e9, HOSTS.group(4)).between == 0


@pytest.mark.parametrize(
    ("size", "stride", "hosts", "each"), [(16, 1, 4, 4), (4, 1, 1, 4), (8, 2, 4, 2), (4, 4, 4, 1), (2, 8, 2, 1)]
)
def test_where_a_group_is(size, stride, hosts, each):
    group = HOSTS.group(size, stride)
    assert (group.hosts, group.each) == (hosts, each)
