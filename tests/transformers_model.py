"""The default model as transformers runs it: the reference of everything that says "same tokens"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def transformers_model_of_gguf(path: Path) -> Any:
    """What `from_pretrained(gguf_file=...)` gives, put together by hand: that one asks for accelerate."""
    from transformers import AutoConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)["tensors"]
    model = LlamaForCausalLM(config)
    state = {name: torch.as_tensor(tensor, dtype=torch.float32) for name, tensor in tensors.items()}
    left_out = model.load_state_dict(state, strict=False)
    assert left_out.missing_keys == ["lm_head.weight"]
    assert not left_out.unexpected_keys
    model.tie_weights()
    return model.eval()
