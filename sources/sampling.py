"""Write text with a model: draw one token after another."""

from dataclasses import dataclass
from typing import Literal

import torch
from tyro.conf import Positional

from lib import runtime
from lib.settings import UserError, at_least
from sources import checkpoint
from sources.tokenizers import load_tokenizer


@dataclass
class SampleSettings:
    """The settings of `train.py sample`."""

    model: Positional[str] = "runs/default"  # a run, a folder, a .gguf file, smollm2, or a name of the Hub
    prompt: str = ""  # text to continue; BOS comes before it
    tokens: at_least(1) = 200  # largest number to write; EOS ends a text, too
    temperature: at_least(0, float) = 0.8  # divides the logits; 0: always the likeliest token
    top_k: at_least(1) | None = None  # draw only from this many likeliest tokens; None: all
    seed: int = 0  # seed of the draws
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where to compute; auto: cuda, then cpu


@torch.no_grad()
def generate(model, tokenizer, generator, prompt="", count=48, temperature=0.8, top_k=None):
    """The text, up to `count` tokens, that a model writes after BOS (or token 0) and a prompt."""
    vocab_size = min(tokenizer.vocab_size, model.config.vocab_size)  # either may have more
    (prompt_tokens,) = tokenizer.encode([prompt])
    tokens = torch.tensor([[tokenizer.bos or 0, *prompt_tokens]], device=model.device)  # (1, T)
    for _ in runtime.progress(range(count), desc="writing", unit=" tokens", leave=False):
        state = model.hidden(tokens[:, -model.config.context_length :], last_only=True)  # (1, d)
        logits = model.unembed(state)[0, :vocab_size].float().cpu()
        likeliest = logits.topk(vocab_size if top_k is None else min(top_k, vocab_size))  # sorted
        choice = torch.tensor([0])
        if temperature > 0:
            choice = torch.multinomial((likeliest.values / temperature).softmax(0), 1, generator=generator)
        token = likeliest.indices[choice]  # (1,)
        if token.item() in tokenizer.ends:
            break
        tokens = torch.cat((tokens, token[None].to(model.device)), dim=1)
    return tokenizer.decode(tokens[0, 1 + len(prompt_tokens) :].tolist())


def sample(settings: SampleSettings) -> None:
    """Continue a prompt with a checkpoint."""
    spec = checkpoint.parse_spec(settings.model)
    model = spec.load(runtime.choose_device(settings.device))
    if spec.tokenizer_file is None:
        raise UserError(f"{spec.label} has no tokenizer that we can read")
    tokenizer = load_tokenizer(str(spec.tokenizer_file))
    generator = torch.Generator().manual_seed(settings.seed)
    options = (settings.prompt, settings.tokens, settings.temperature, settings.top_k)
    print(settings.prompt + generate(model, tokenizer, generator, *options))
