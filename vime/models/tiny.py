"""Makes a tiny model folder: random weights, a byte tokenizer, a short chat template.

The folder is an ordinary Hugging Face one, so that everything that reads a downloaded model reads this one too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vime.config import TinyModel
from vime.errors import UserError
from vime.models.family import family

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (PAD, USER, ASSISTANT, END, *(f"<|reserved_{i}|>" for i in range(4)))
VOCABULARY_SIZE = 256 + len(SPECIAL)
"""A token for each byte, and the special ones."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tiny(tiny: TinyModel, folder: Path) -> None:
    """Write config.json, tokenizer and safetensors of a tiny model into `folder`. The same `tiny` gives the same bytes.

    The tokenizer maps each byte to one token (256 ids, then 8 special ones), so that any text has ids and no id is two
    texts. Raises UserError when the family is unknown or cannot have these sizes.
    """
    entries = tiny_hf_config(tiny)
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=tiny.context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    config = AutoConfig.for_model(
        tiny.family,
        **entries,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tiny.seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                torch.nn.init.normal_(buffer, std=tiny.routing_bias)
    model.generation_config.eos_token_id = fast.eos_token_id
    model.save_pretrained(folder)


def tiny_hf_config(tiny: TinyModel) -> dict[str, Any]:
    """The entries of a tiny model's config.json that say what it computes.

    Raises UserError when the family is unknown or cannot have these sizes.
    """
    found = family(tiny.family, f"model.tiny.family={tiny.family}")
    if (tiny.experts > 0) != found.experts:
        raise UserError(
            f"model.tiny.experts={tiny.experts} with model.tiny.family={tiny.family}, which"
            f" {'is a mixture of experts' if found.experts else 'has none'}"
        )
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.ffn,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": tiny.context,
        "tie_word_embeddings": tiny.tied_embeddings,
        "initializer_range": tiny.initializer_range,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **found.tiny(tiny),
    }
