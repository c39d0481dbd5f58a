"""The benchmark of the split head runs on two processes without a GPU, and every way to compute it agrees."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from liger_trainer.benchmarks import vocab_parallel

pytestmark = pytest.mark.skipif(not dist.is_available() or torch.cuda.is_available(), reason="runs on CPUs")


def test_every_provider_gives_what_one_process_gives(tmp_path):
    output = tmp_path / "results.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    command = ["-m", "liger_trainer.benchmarks.vocab_parallel", "--model", "tiny", "--tokens", "32", "--rounds", "2"]
    done = subprocess.run(
        [*launcher, *command, "--dtype", "float32", "--output", str(output)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("liger_trainer") == 2
    lines = json.loads(output.read_text())
    ways = {operation: list(providers) for operation, providers in vocab_parallel.PROVIDERS.items()}
    assert [(line["operation"], line["provider"]) for line in lines] == [
        (operation, name) for operation, names in ways.items() for name in names
    ]
    for line in lines:
        if line["provider"] == "liger-kernel":  # has no soft-cap, which the tiny model has
            assert line["failure"]
            continue
        assert line["failure"] == ""
        assert set(line["errors"]) == {"output", "dhidden", "dweight"}
        assert max(line["errors"].values()) < 2e-5
        assert min(line["forward"], line["backward"]) > 0


def test_it_says_how_it_is_started(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        vocab_parallel.main(["--model", "tiny"])
    assert "torchrun --nproc_per_node" in capsys.readouterr().err
