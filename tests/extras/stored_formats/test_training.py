"""Models trained from the checkpoints that hold them in fewer bits, beside the same weights in
full."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from tests.cases import seldom
from tests.extras.stored_formats import writing
from tests.extras.stored_formats.test_forms import FORMS
from tests.integration.oracles import assert_agree, assert_close, save_adapter, torch_run
from tests.integration.test_parity import assert_same, weights
from tests.samples import save_llama, save_tiny

pytestmark = pytest.mark.xdist_group("pool")

TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt_oss": ["q_proj", "o_proj"],
    "deepseek_v3": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"],
    "qwen3_moe": ["q_proj", "v_proj"],
}
# Form and architecture. 140 + 8 rows of kv_a_proj are no multiple of 128.
OF_LLAMA = ("fp8 by tensor", "fp8 by row", "gptq 3", "gptq 4 in order of importance", "awq")
CASES = {
    **dict.fromkeys(OF_LLAMA, "llama"),
    **{"fp8 in blocks": "deepseek_v3", "fp8 in blocks, of each expert": "qwen3_moe"},
    "mxfp4": "gpt_oss",
}
LIBRARY = {
    "fp8 by tensor": FineGrainedFP8Config(dequantize=True),
    "mxfp4": Mxfp4Config(dequantize=True),
}
"""Settings with which transformers makes such weights full on a CPU."""
SELDOM = [case for case in CASES if case != "fp8 in blocks"]


def saved(case: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint in a form, and one of full precision with the weights that it stands for."""
    dense, stored, full = (folder / name for name in ("dense", "stored", "full"))
    if CASES[case] == "llama":
        save_llama(dense, hidden_size=64, intermediate_size=128)
    elif CASES[case] == "deepseek_v3":
        save_tiny("deepseek_v3", dense, kv_lora_rank=140)
    else:
        save_tiny(CASES[case], dense)
    meant = writing.rewrite(dense, stored, *FORMS[case.partition(",")[0]])
    shutil.copytree(dense, full)
    for file in dense.iterdir():
        if not (stored / file.name).exists():
            shutil.copy(file, stored)
    if (how := LIBRARY.get(case)) is not None:  # its save_pretrained would name them otherwise
        meant = AutoModelForCausalLM.from_pretrained(stored, quantization_config=how).state_dict()
    tensors = {name: tensor.float().contiguous() for name, tensor in meant.items()}
    save_file(tensors, full / "model.safetensors", {"format": "pt"})
    return stored, full


@pytest.mark.parametrize("is_full", seldom((False, True), True), ids=["lora", "full"])
@pytest.mark.parametrize("case", seldom(CASES, *SELDOM))
def test_training_from_a_stored_form_equals_one_process_and_the_full_weights(
    case, is_full, losses, texts, tmp_path
):
    stored, full = saved(case, tmp_path)
    adapter, sections = None, {}
    if not is_full:
        targets = TARGETS[CASES[case]]
        adapter = save_adapter(full, tmp_path / "adapter", target_modules=targets)
        sections["adapter"] = {"init_from": str(adapter)}
    sections |= {"model": {"name_or_path": str(stored)}, "training": {"num_train_epochs": 2}}
    whole = losses([], "whole", **sections)
    assert len(whole) == 6
    for cuts in ([3], [2, 4]):
        name = "-".join(map(str, cuts))
        assert losses(cuts, name, **sections) == whole
        assert_same(weights(tmp_path / name), weights(tmp_path / "whole"))
    theirs, trained = torch_run(full, texts, adapter, num_train_epochs=2)
    assert_agree(whole, theirs)
    if not is_full:
        assert_close(weights(tmp_path / "whole"), trained)
