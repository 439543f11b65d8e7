"""Builds tiny random models of each family, a character tokenizer, engines over them, and the plain forward pass."""

from __future__ import annotations

import asyncio
from functools import cache
from tempfile import mkdtemp

import numpy as np
import torch
import transformers

from headrace.exchange.channels.in_process import InProcessChannel
from headrace.protocols import Resources, WorkerContext
from headrace.rollout.config import EngineConfig
from headrace.rollout.engines.hf import build_hf
from headrace.rollout.engines.native.engine import build_native
from headrace.types import GenerateRequest, Generation, RequestKey, SamplingParams

torch.set_num_threads(1)

VOCAB, END = 97, 1
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma", "gemma2", "gemma3", "phi3")
EXPERTS = ("qwen3_moe", "mixtral")
FAST = ("llama", "qwen2", "qwen3")
BUILDERS = {"native": build_native, "hf": build_hf}


def build_model(family: str, seed: int = 0, **changes):
    """A small random causal LM whose distributions are far from uniform."""
    base = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.25,
        bos_token_id=0,
        eos_token_id=END,
        pad_token_id=END,
        tie_word_embeddings=False,
    )
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    t = transformers
    kinds = {
        "llama": (t.LlamaForCausalLM, t.LlamaConfig, {}),
        "qwen2": (t.Qwen2ForCausalLM, t.Qwen2Config, {"tie_word_embeddings": True}),
        "qwen3": (t.Qwen3ForCausalLM, t.Qwen3Config, {"head_dim": 12}),
        "qwen3_moe": (t.Qwen3MoeForCausalLM, t.Qwen3MoeConfig, {"head_dim": 8, **experts}),
        "mixtral": (
            t.MixtralForCausalLM,
            t.MixtralConfig,
            {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        ),
        # Half of each head is turned, and it looks back a window.
        "phi3": (t.Phi3ForCausalLM, t.Phi3Config, {"partial_rotary_factor": 0.5, "sliding_window": 12}),
        "gemma": (t.GemmaForCausalLM, t.GemmaConfig, {"head_dim": 8, "tie_word_embeddings": True}),
        "gemma2": (t.Gemma2ForCausalLM, t.Gemma2Config, {"head_dim": 8, "sliding_window": 8}),
        "gemma3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig, {"head_dim": 8, "sliding_window": 8}),
    }
    model, config, own = kinds[family]
    torch.manual_seed(seed)
    built = model(config(**{**base, **own, **changes})).eval().requires_grad_(False)
    for name, weight in built.named_parameters():
        if name.endswith("bias") or "norm" in name:
            weight.add_(0.1 * torch.randn_like(weight))
    return built


@cache
def folder_of(family: str = "llama", seed: int = 0, tokenizer: bool = True, **changes) -> str:
    folder = mkdtemp(prefix="headrace-model-")
    build_model(family, seed, **changes).save_pretrained(folder)
    if tokenizer:
        char_tokenizer().save_pretrained(folder)
    return folder


@cache
def reference(family: str = "llama", seed: int = 0):
    return build_model(family, seed)


def char_tokenizer():
    """Ids 2 and up are characters from the space on; `ab` and `é` in two bytes are not needed: one id, one character."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<s>": 0, "<end>": END, **{chr(32 + i): 2 + i for i in range(VOCAB - 2)}}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    plain.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<end>")


def context(events: list | None = None) -> WorkerContext:
    return WorkerContext(
        name="engine-0",
        record=(events.append if events is not None else lambda _: None),
        resources=Resources(threads=1),
    )


def build_engine(
    kind="native", folder=None, channel=None, kv_on_swap="keep", inline=True, events=None, dtype="float32", **engine
):
    config = EngineConfig(**{"max_running": 8, "block_size": 4, **engine})
    return BUILDERS[kind](context(events), config, folder or folder_of(), dtype, channel, kv_on_swap, inline=inline)


def ask(prompt, name="a", member=0, attempt=0, prefix=None, kv_handle=None, **sampling) -> GenerateRequest:
    return GenerateRequest(
        key=RequestKey(lease_id=name, member=member, attempt=attempt),
        group_id=name,
        prompt_ids=np.array(prompt, dtype=np.int64),
        sampling=SamplingParams(**{"max_tokens": 16, "seed": 7 + member, **sampling}),
        prefix=prefix,
        kv_handle=kv_handle,
    )


def endless(count: int, **more) -> dict:
    """Sampling that ends at exactly `count` tokens."""
    return {"max_tokens": count, "min_tokens": count, **more}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, size=length).tolist()


def plain_logprobs(model, request: GenerateRequest, generation: Generation, temperature: float = 1.0) -> np.ndarray:
    """[T] what one plain forward pass over the whole sequence says of the sampled tokens (while `min_tokens` is not
    reached, the end token cannot come)."""
    ids = torch.tensor([[*request.prompt_ids.tolist(), *generation.token_ids.tolist()]])
    with torch.inference_mode():
        logits = model(ids).logits[0].float() / temperature
    logits = logits.clone()
    start = request.prompt_ids.size
    logits[start - 1 : start - 1 + request.sampling.min_tokens, END] = float("-inf")
    return logits.log_softmax(-1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0].numpy()


def forcing(model, token: int):
    """The model's tensors changed so that every position gives all its probability to `token`."""
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.embed_tokens.weight"].fill_(1.0)
    tensors["model.norm.weight"].fill_(1.0)
    tensors["lm_head.weight"].zero_()
    tensors["lm_head.weight"][token] = 10.0
    return list(tensors.items())


def publish(channel: InProcessChannel, model, version: int):
    return channel.publish(list(model.state_dict().items()), version)


async def until(condition, engine, timeout_s: float = 20.0) -> None:
    """Wait until condition(stats) holds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while not condition(await engine.stats()):
        assert loop.time() < deadline, f"waited in vain: {await engine.stats()}"
        # Polling without a pause would take the interpreter away from an engine's thread.
        await asyncio.sleep(0 if getattr(engine, "inline", False) else 0.0005)


def sampled(stats, request: GenerateRequest) -> int:
    return stats.progress.get(request.request_id, 0)


__all__ = [name for name in dir() if not name.startswith("_") and name != "Path"]
