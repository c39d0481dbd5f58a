"""Models of which there is nothing but a config.json."""

import pytest
from transformers import AutoConfig

from liger_trainer.recipe.published_configs import PUBLISHED

_NAMES = {
    "llama3_8b": "meta-llama/Llama-3.1-8B",
    "qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B",
    "gemma3_4b": "google/gemma-3-4b-it",
}


@pytest.fixture(scope="session")
def configs(tmp_path_factory):
    """Family to a folder with its published sizes, as the shipped recipes name it in their file names."""
    root = tmp_path_factory.mktemp("configs")
    for family, name in _NAMES.items():
        AutoConfig.for_model(**PUBLISHED[name]).save_pretrained(root / family)
    return {family: str(root / family) for family in _NAMES}
