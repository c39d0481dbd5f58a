"""Merged weights in the FP8 blocks of their base: to the bit, read by the stock library, with the right numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from liger_trainer import load_packed
from liger_trainer.errors import UserError
from liger_trainer.kernels.lowbit.decode import decode
from liger_trainer.kernels.lowbit.formats import fp8_weight
from liger_trainer.packed.loading import dequantise, packed_modules
from liger_trainer.tools.cli import main
from liger_trainer.tools.export.fp8_blocks import in_blocks
from liger_trainer.tools.export.merging import SURVIVAL_FILE, merge
from liger_trainer.tools.export.saved_run import find_run
from liger_trainer.trainers.checkpoints.saved_weights import FILE
from tests.low_bit import write_fp8, write_mxfp4
from tests.packed_checkpoints import add_scales_of_caches, write_dense, write_mixture, write_nested
from tests.tools.cli.runs import message_of

pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
VALUES = CODES.float().double()


def saved_run(folder, size, **lora):
    """Random adapters of some size on the base in `folder`, as a run saves them; the base, and the merged model."""
    base = dequantise(load_packed(str(folder / "base"), dtype=torch.bfloat16))
    before = {name: each.detach().float().clone() for name, each in base.named_parameters()}
    torch.manual_seed(1)
    adapted = get_peft_model(base.float(), LoraConfig(r=4, task_type="CAUSAL_LM", **lora))
    for name, each in adapted.named_parameters():
        if "lora_" in name:
            each.data.normal_(std=size)
    adapted.save_pretrained(folder / "run")
    file = folder / "run" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(folder / "base")}))
    return before, {name: each.detach() for name, each in adapted.merge_and_unload().named_parameters()}


def spread(scale, shape):
    """Scales of blocks of 128 x 128 as one for each weight."""
    wide = scale.float().double() if scale.dtype != torch.uint8 else torch.exp2(scale.double() - 127)
    wide = wide.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return wide[..., : shape[0], : shape[1]]


def nearest(weight, scale):
    """What each weight is rounded to: of all values that its block has, the nearest.

    Also where fp32 may see the middle between two codes elsewhere, and the squared error of each block.
    """
    values, wide = VALUES[~VALUES.isnan()].unique(), spread(scale, weight.shape)
    target = (weight.double() / wide).clamp(-448, 448)
    place = torch.searchsorted(values, target.contiguous()).clamp(1, len(values) - 1)
    below, above = values[place - 1], values[place]
    found = torch.where((target - below).abs() <= (above - target).abs(), below, above)
    error = (found * wide - weight.double()).square()
    error = torch.stack([block.sum() for row in error.split(128) for block in row.split(128, 1)]).view(scale.shape)
    return found, ((target - below) - (above - target)).abs() < 1e-5 * target.abs(), error


def asked_for(weight, dtype):
    """The scales with which the largest weight of each block is the largest code."""
    largest = [block.abs().max() for row in weight.split(128) for block in row.split(128, 1)]
    reach = torch.stack(largest).view(-(-weight.shape[0] // 128), -1).float() / 448
    return torch.exp2(reach.log2().ceil()).to(dtype) if dtype == torch.float8_e8m0fnu else reach


def published(weights):
    """The weights of a mixture by the names of its checkpoint."""
    found = {}
    for name, each in weights.items():
        if ".experts." not in name:
            found[name] = each
            continue
        path = name.rpartition(".")[0]
        for number, matrix in enumerate(each):
            parts = zip(("gate_proj", "up_proj"), matrix.chunk(2)) if "gate_up" in name else [("down_proj", matrix)]
            found |= {f"{path}.{number}.{part}.weight": rows for part, rows in parts}
    return found


FORMS = {
    "mixture": (write_mixture, {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}),
    "quantised by transformers": (write_fp8, {"target_modules": ["v_proj"], "target_parameters": EXPERTS[:1]}),
    "dense": (lambda folder: write_dense(folder, "fp8 blocks"), {"target_modules": ["down_proj", "q_proj"]}),
    "powers of two": (lambda folder: write_dense(folder, "fp8 ue8m0"), {"target_modules": ["up_proj", "lm_head"]}),
}


@pytest.mark.parametrize("size", [0.01, 0.3])
@pytest.mark.parametrize("name", FORMS)
def test_codes_and_numbers(name, size, tmp_path):
    write, lora = FORMS[name]
    write(tmp_path / "base")
    before, merged = saved_run(tmp_path, size, **lora)
    proof = merge(find_run(str(tmp_path / "run")), tmp_path / "out", say=lambda line: None, to="fp8")
    assert json.loads((tmp_path / "out" / SURVIVAL_FILE).read_text()) == json.loads(
        json.dumps(proof.survival.as_dict())
    )
    old, new = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "out"))
    assert old.keys() == new.keys()
    settings = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("base", "out")]
    assert settings[0]["quantization_config"] == settings[1]["quantization_config"]
    before, merged = published(before), published(merged)
    changed = [key for key in merged if not torch.equal(before[key], merged[key])]
    assert changed
    grown = blocks = 0
    for key, weight in merged.items():
        scale_name = key.replace("weight", "weight_scale_inv")
        if scale_name not in old:
            assert torch.equal(new[key], weight.to(torch.bfloat16)), key
            continue
        codes, scale = new[key], new[scale_name]
        assert (codes.dtype, scale.dtype, codes.shape) == (torch.float8_e4m3fn, old[scale_name].dtype, weight.shape)
        if key not in changed:
            assert torch.equal(codes.view(torch.uint8), old[key].view(torch.uint8)), key
            assert torch.equal(scale.view(torch.uint8), old[scale_name].view(torch.uint8)), key
            continue
        wanted, tie, errors = nearest(weight, scale)
        assert torch.equal(codes.float().double()[~tie], wanted[~tie]), key
        assert tie.float().mean() < 0.01
        _, _, if_kept = nearest(weight, old[scale_name])
        other = asked_for(weight, scale.dtype)
        _, _, if_not = nearest(weight, other)
        kept = scale.float() == old[scale_name].float()
        assert torch.equal(scale.float()[~kept], other.float()[~kept]), key
        assert (errors <= torch.minimum(if_kept, if_not) * (1 + 1e-4)).all(), "the better of both scales"
        grown, blocks = grown + int((~kept).sum()), blocks + kept.numel()
    assert grown > blocks // 4 if size > 0.1 else grown <= blocks // 4
    numbers(proof.survival, before, merged, new, changed)


def numbers(survival, before, merged, new, changed, dtype=torch.bfloat16):
    """The share and the error, computed here from the files."""
    sums = {}
    for key in changed:
        scale = new.get(key.replace("weight", "weight_scale_inv"))
        if scale is None:
            continue
        read = (new[key].float().double() * spread(scale, new[key].shape)).to(dtype).double()
        change, left = merged[key].double() - before[key].double(), read - before[key].double()
        path, stack = key, key.partition(".experts.")
        if stack[1]:
            path = f"{stack[0]}.experts.{'down_proj' if 'down_proj' in key else 'gate_up_proj'}"
        found = torch.stack([(left * change).sum(), change.square().sum(), (left - change).square().sum()])
        sums[path] = sums.get(path, 0) + found
    assert survival.layers.keys() == sums.keys()
    for kept, (along, change, beside) in [
        *((survival.layers[path], each) for path, each in sums.items()), (survival.model, sum(sums.values())),
    ]:  # fmt: skip
        assert kept.share == pytest.approx((along / change).item(), rel=1e-4)
        assert kept.error == pytest.approx((beside / change).sqrt().item(), rel=1e-4)
    assert survival.layers[survival.worst].share == min(each.share for each in survival.layers.values())


@pytest.mark.parametrize("size", [0.01, 0.3])
@pytest.mark.parametrize(
    ("write", "lora"),
    [
        (lambda folder: write_dense(folder, "fp8 rows"), {"target_modules": ["down_proj", "q_proj"]}),
        (
            lambda folder: write_mixture(folder, "fp8 rows"),
            {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
        ),
    ],
    ids=["dense", "mixture"],
)
def test_a_scale_a_row(write, lora, size, tmp_path):
    """As compressed-tensors has it, with the other tensors of linear layers as they were."""
    write(tmp_path / "base")
    before, merged = saved_run(tmp_path, size, **lora)
    proof = merge(find_run(str(tmp_path / "run")), tmp_path / "out", say=lambda line: None, to="fp8")
    old, new = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "out"))
    assert new.keys() == old.keys()
    others = [key for key in old if key.endswith("input_scale")]
    assert others
    assert all(torch.equal(new[key], old[key]) for key in others)
    before, merged = published(before), published(merged)
    kept = rows = 0
    for key, weight in merged.items():
        name = f"{key}_scale"
        if name not in new:
            assert torch.equal(new[key], weight.to(torch.bfloat16)), key
            continue
        assert (new[key].dtype, new[name].dtype, new[name].shape) == (CODES.dtype, torch.bfloat16, (len(weight), 1))
        if torch.equal(before[key], weight):
            assert torch.equal(new[key].view(torch.uint8), old[key].view(torch.uint8)), key
            assert torch.equal(new[name], old[name]), key
            continue
        asked = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
        (value, tie, error), *others = (rounded_rows(weight, each) for each in (new[name], old[name], asked))
        found = new[key].float().double() * new[name].double()
        assert torch.equal(found[~tie], value[~tie]), key
        assert tie.float().mean() < 0.01
        assert (error <= torch.minimum(*(each for *_, each in others)) * (1 + 1e-4)).all(), "the better of both scales"
        kept, rows = kept + int((new[name] == old[name]).sum()), rows + len(weight)
    assert rows
    assert kept > rows // 2 if size < 0.1 else kept < rows
    assert 0 < proof.survival.model.share <= 1.2


def test_scales_of_a_cache(tmp_path):
    """They are written as they were, as the configuration asks for them."""
    write_mixture(tmp_path / "base", "fp8 rows")
    names = add_scales_of_caches(tmp_path / "base")
    saved_run(tmp_path, 0.1, target_modules=["q_proj"])
    merge(find_run(str(tmp_path / "run")), tmp_path / "out", say=lambda line: None, to="fp8")
    old, new = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "out"))
    assert {*old} - {*new} == {"model.layers.9.self_attn.k_scale"}, "of a layer that the model has not"
    assert all(torch.equal(new[name], old[name]) for name in names)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["kv_cache_scheme"]["num_bits"] == 8


def rounded_rows(weight, scale):
    """As `nearest`, of rows with a scale each."""
    values, target = VALUES[~VALUES.isnan()].unique(), weight.double() / scale.double()
    place = torch.searchsorted(values, target.clamp(-448, 448)).clamp(1, len(values) - 1)
    below, above = values[place - 1], values[place]
    found = torch.where((target - below).abs() <= (above - target).abs(), below, above) * scale.double()
    tie = ((target - below) - (above - target)).abs() < 1e-5 * target.abs()
    return found, tie, (found - weight.double()).square().sum(1, keepdim=True)


def test_scales_that_are_powers_of_two_in_fp32(tmp_path):
    """As the configuration says, and as transformers loads them (`scale_fmt`)."""
    write_dense(tmp_path / "base", "fp8 blocks")
    file, config = tmp_path / "base" / "model.safetensors", tmp_path / "base" / "config.json"
    old = load_file(file)
    old = {name: each.log2().round().exp2() if name.endswith("scale_inv") else each for name, each in old.items()}
    save_file(old, file, {"format": "pt"})
    settings = json.loads(config.read_text())
    settings["quantization_config"]["scale_fmt"] = "ue8m0"
    config.write_text(json.dumps(settings))
    saved_run(tmp_path, 0.3, target_modules=["up_proj", "q_proj"])
    merge(find_run(str(tmp_path / "run")), tmp_path / "out", say=lambda line: None, to="fp8")
    new = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: each for name, each in new.items() if name.endswith("scale_inv")}
    for name, each in scales.items():
        assert each.dtype == torch.float32
        assert torch.equal(each, each.to(torch.float8_e8m0fnu).float()), name
    assert any(not torch.equal(each, old[name]) for name, each in scales.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype_beside_the_codes(dtype, tmp_path):
    write_dense(tmp_path / "base", "fp8 blocks")
    before, merged = saved_run(tmp_path, 0.1, target_modules=["q_proj"])
    proof = merge(find_run(str(tmp_path / "run")), tmp_path / "out", dtype, lambda line: None, "fp8")
    old, new = (load_file(tmp_path / each / "model.safetensors") for each in ("base", "out"))
    assert {new[key].dtype for key in new if f"{key}_scale_inv" not in new and "scale" not in key} == {dtype}
    numbers(proof.survival, before, merged, new, [key for key in merged if "q_proj" in key], dtype)
    key = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(new[key].view(torch.uint8), old[key].view(torch.uint8))


@pytest.mark.parametrize("to", [None, "fp8"])
def test_settings_of_the_text_configuration(to, tmp_path):
    model_class = write_nested(tmp_path / "base")
    base = dequantise(load_packed(str(tmp_path / "base"), model_class, dtype=torch.bfloat16)).float()
    torch.manual_seed(1)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=r".*language_model.*(q|up)_proj"))
    for name, each in adapted.named_parameters():
        if "lora_" in name:
            each.data.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "run")
    merge(find_run(str(tmp_path / "run"), str(tmp_path / "base")), tmp_path / "out", say=lambda line: None, to=to)
    old, new = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("base", "out"))
    wanted = None if to is None else old["text_config"]["quantization_config"]
    assert new["text_config"].get("quantization_config") == wanted
    assert "quantization_config" not in new
    expected = adapted.merge_and_unload()
    if to is None:
        found = model_class.from_pretrained(tmp_path / "out", dtype="auto")
        for name, each in expected.named_parameters():
            assert torch.equal(found.get_parameter(name), each.to(torch.bfloat16)), name
    else:  # what its codes mean is compared by the proof
        old, new = (load_packed(str(tmp_path / each), model_class) for each in ("base", "out"))
        assert [*packed_modules(old)] == [*packed_modules(new)] != []


@pytest.mark.parametrize(("size", "share", "error"), [(0.01, 0.38, 0.86), (0.03, 0.80, 0.62), (0.1, 0.99, 0.26)])
def test_what_the_guide_says_of_gaussian_weights(size, share, error):
    weight = torch.randn(1024, 1024) * 0.02
    scales = weight.view(8, 128, 8, 128).abs().amax((1, 3)) / 448
    codes = (weight / spread(scales, weight.shape).float()).to(CODES.dtype)
    base = fp8_weight(codes, scales, (128, 128))
    before, change = decode(base).float(), torch.randn(1024, 8) @ torch.randn(8, 1024)
    change *= size * before.norm() / change.norm()
    left = decode(in_blocks(before + change, base)).float() - before
    assert ((left * change).sum() / change.square().sum()).item() == pytest.approx(share, abs=0.02)
    assert ((left - change).norm() / change.norm()).item() == pytest.approx(error, abs=0.02)
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "after-training.md").read_text(encoding="utf-8")
    assert f"| {size:.0%} | {share:.0%} | {error:.0%} |".replace("%", " %") in guide


def test_the_stock_library_reads_it(tmp_path, monkeypatch):
    write_fp8(tmp_path / "base")
    saved_run(tmp_path, 0.1, target_modules=["q_proj", "v_proj"], target_parameters=EXPERTS)
    merge(find_run(str(tmp_path / "run")), tmp_path / "out", say=lambda line: None, to="fp8")
    file = load_file(tmp_path / "out" / "model.safetensors")
    decoded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype="auto", quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    for key, weight in published(dict(decoded.named_parameters())).items():
        scale = file.get(key.replace("weight", "weight_scale_inv"))
        wanted = file[key] if scale is None else (file[key].float() * spread(scale, weight.shape).float()).bfloat16()
        assert torch.equal(weight, wanted), key
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", device_map="cpu")
    held = published(
        {name: each.view(torch.uint8) for name, each in packed.named_parameters() if each.dtype == CODES.dtype}
    )
    assert len(held) == sum(name.endswith("_scale_inv") for name in file)
    for key, codes in held.items():
        assert torch.equal(codes, file[key].view(torch.uint8)), key


def test_another_base_is_named(tmp_path):
    """The same adapters on a base in another format, as the user may mean; the proof compares with this one."""
    for name in ("fp8 blocks", "int4"):
        write_dense(tmp_path / name, name)
    (tmp_path / "fp8 blocks").rename(tmp_path / "base")
    saved_run(tmp_path, 0.02, target_modules=["q_proj"])
    config = json.loads((tmp_path / "base" / "config.json").read_text())["quantization_config"]
    (tmp_path / "run" / FILE).write_text(json.dumps({"config": config, "dtype": "bfloat16"}))
    lines: list[str] = []
    merge(find_run(str(tmp_path / "run")), tmp_path / "same", say=lines.append)
    assert not any("is another" in line for line in lines)
    merge(find_run(str(tmp_path / "run"), str(tmp_path / "int4")), tmp_path / "other", say=lines.append)
    assert any(
        "trained on a base in fp8; " in line and "in compressed-tensors pack-quantized, is another" in line
        for line in lines
    )
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"there is no folder .*base'; say where it is now with `--base_model`"):
        merge(find_run(str(tmp_path / "run")), tmp_path / "moved_base")


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(["merge", *map(str, arguments)]) == 2
    return message_of(capsys.readouterr().err)


def test_the_command_to_fp8(tmp_path, capsys):
    write_mixture(tmp_path / "base")
    saved_run(tmp_path, 0.02, target_modules=["q_proj"], target_parameters=EXPERTS)
    run = tmp_path / "run"
    assert "`--to` and `--dtype` are given" in refused(capsys, run, "--to", "fp8", "--dtype", "float32")
    assert "`--to` and `--gguf` are given" in refused(capsys, run, "--to", "fp8", "--gguf", "q8_0")
    assert "`--to` is 'mxfp4': merging into 4 bits would lose most of" in refused(capsys, run, "--to", "mxfp4")
    assert "`--to` is 'int8'; it may be 'fp8', or left out" in refused(capsys, run, "--to", "int8")
    assert not (run / "merged").exists()
    assert main(["merge", str(run), "--to", "fp8"]) == 0
    shown = capsys.readouterr().out
    found = json.loads((run / "merged" / SURVIVAL_FILE).read_text())
    assert (
        f"In FP8, {found['share']:.1%} of the adapters' change survives, with an error of {found['error']:.1%}" in shown
    )
    worst = found["layers"][found["worst"]]
    assert f"in {found['worst']}, the worst, {worst['share']:.1%} with {worst['error']:.1%}." in shown
    assert "exists and is not an empty folder" in refused(capsys, run, "--to", "fp8")


def write_fixed_scales(folder):
    """With scales of activations that were measured on the base."""
    write_dense(folder, "fp8 rows")
    config = json.loads((folder / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": False}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (write_mxfp4, r"base' was published in another format \(mxfp4\)\. Leave `--to` out, which merges into 16 bits"),
        (
            lambda folder: write_dense(folder, "int4"),
            r"another format \(compressed-tensors, pack-quantized, group scales\)",
        ),
        pytest.param(write_fixed_scales, r"channel scales, fixed scales of activations\)", id="fixed_scales"),
        (lambda folder: write_dense(folder, "fp8 tensor"), r"published in another format \(fp8, a scale a matrix\)"),
    ],
)
def test_bases_in_other_formats_are_refused(write, message, tmp_path):
    write(tmp_path / "base")
    saved_run(tmp_path, 0.1, target_modules=["q_proj"])
    with pytest.raises(UserError, match=message):
        merge(find_run(str(tmp_path / "run")), tmp_path / "out", to="fp8")
