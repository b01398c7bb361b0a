"""Does the sink move onto a constant key and value in front of the text? (ours, after SO)

If heads sink on position 1 for what stands there, a mean key and value of position 1 in front of another text
take the sink over, and the text's own first token is a token like others.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from lib.settings import UserError, at_least
from measure import attention
from measure.figures import draw_heads, draw_transplants
from measure.units import observe, zero_units
from model import Transformer
from sources.checkpoint import check_lengths
from sources.inputs import TextExperiment, TextSettings, prefix_of, read_tokens, text_of
from sources.saving import save_constants

# The first predictions have almost no context, so any extra token in front lowers their loss: told apart.
EARLY = 8


@dataclass
class TransplantSettings(TextSettings):
    """The settings of `transplant`."""

    sequence_length: tuple[at_least(5), ...] = (64,)  # tokens in a sequence
    num_sequences: at_least(2) = 32  # sequences; fewer, down to 4, if they are longer than 64 tokens
    num_constants: at_least(1) = 16  # extra sequences, whose first position gives the constants
    save: str | None = None  # new .safetensors file for the constants


@dataclass
class Case:
    """A model that reads the text, and what is changed."""

    kind: str
    model: Transformer
    front: tuple = ()  # tokens in front of the text
    ablated: list = field(default_factory=list)  # neurons at zero


def cases_of(model, constants, activity, extra, prefix):
    """The model as it is, with constants, and with a token in front.

    Anything in front gives the text's first token something to attend to, so losses with constants are best
    compared with those with an arbitrary token in front. BOS (or what else the model was trained with) is in
    front, except where the constants replace it.
    """
    moved = attention.with_constants(model, constants)
    builders = activity.selective()
    tokens = extra.unique().tolist()  # of the windows that give the constants
    return [
        Case("unchanged", model, prefix),
        Case("builders at zero", model, prefix, builders),
        Case("moved", moved),
        Case("moved, builders at zero", moved, (), builders),
        Case("token in front", model, (tokens[len(tokens) // 2],)),
    ]


@torch.inference_mode()
def transplant(settings: TransplantSettings, cases_of=cases_of):
    """Does the sink move onto a constant? Each head gets position 1's mean key and value (ours; minutes)"""
    if settings.save and (len(settings.model) > 1 or Path(settings.save).exists()):
        raise UserError(f"--save {settings.save}: expected a new file, and one model")
    experiment = TextExperiment("transplant", "ours, after SO", settings)
    rows, layers, heads = [], [], []
    for named, spec, model in experiment.models():
        check_lengths(settings.sequence_length, model.config.context_length - 1)  # a token may be in front
        prefix = prefix_of(settings, spec)
        for T in settings.sequence_length:
            tokens, extra = split_windows(experiment.settings, spec, T)
            constants = attention.constants_at(model, extra)
            if settings.save and T == settings.sequence_length[0]:
                facts = {
                    "model": spec.label,
                    "position": 1,
                    "prefix": prefix,
                    "text": text_of(settings, spec),
                }
                save_constants(Path(settings.save), constants, **facts)
            activity = observe(model, tokens)
            (builder,) = activity.builders(1)
            text = tokens[:, len(prefix) :]
            for case in cases_of(model, constants, activity, extra, prefix):
                key = named | {"kind": case.kind, "sequence_length": T}
                row, largest, by_head = effects(case, text, builder)
                rows.append(key | row)
                layers += [key | {"layer": layer, "largest": size} for layer, size in largest.items()]
                for title, alpha in maps_of(case, by_head).items():
                    heads.append(key | {"kind": title, "alpha": alpha.tolist()})
    columns = ("checkpoint", "kind", "sequence_length", "sink_rate", "other_sink_rate", "alpha1")
    columns += ("constant_alpha", "builder_activation", "largest", "loss", "loss_from_ninth")
    result = experiment.save(rows, columns, layers=layers, heads=heads)
    draw_transplants(experiment.folder / "transplant.png", rows, layers)
    title = "Does attention move from position 1 to a constant in front of it?"
    draw_heads(experiment.folder / "transplant_heads.png", title, heads, "alpha", 3)
    return result


def maps_of(case: Case, by_head):
    """What is drawn of a case's heads: attention to position 1 and to the constant, (L, H) each, by title."""
    alpha1, constant = by_head.unbind(-1)
    if case.kind == "unchanged":
        return {"as it is, to position 1": alpha1}
    if case.kind == "moved":
        return {"with constants, to position 1": alpha1, "with constants, to the constant": constant}
    return {}


def split_windows(settings: TransplantSettings, spec, T):
    """Disjoint windows of the text: (n, T) to measure, and (c, T) for the constants."""
    n = min(settings.num_sequences, max(4, 64 * settings.num_sequences // T))
    c = settings.num_constants
    return read_tokens(replace(settings, num_sequences=n + c), spec, T).split((n, c))


def effects(case: Case, text: torch.Tensor, builder):
    """A row about a case's sink on a text (n, T); the stream's largest |number| by layer; alpha by head.

    Position 1 is that of the token in front, if there is one; losses are of the text alone.
    """
    before = len(case.front)
    tokens = torch.cat((text.new_tensor(case.front).expand(len(text), -1), text), dim=1)
    largest = defaultdict(float)
    means = attention.Means(len(tokens))

    def on_state(layer, x):
        if layer > 0:  # 0 is the input
            largest[layer] = max(largest[layer], x.abs().amax().item())

    def on_units(layer, units):
        if layer == builder[0]:
            means.add(layer, builder=units[..., builder[1]].float().abs()[:, 0])

    positions = (1, attention.CONSTANT, *range(2, tokens.shape[1] // 2 + 1))
    with case.model.hidden_units(zero_units(case.ablated)), case.model.hidden_units(on_units):
        alpha, losses = alpha_and_loss(case.model, tokens, positions, before, on_state)
    alpha1, _, *others = alpha.unbind(-1)  # (n, L, H) each
    by_head = alpha[..., :2].mean(0)  # to position 1, and to the constant, (L, H, 2)
    row = {
        "sink_rate": attention.sink_share(alpha1).mean().item(),
        "other_sink_rate": attention.sink_share(torch.stack(others).amax(0)).mean().item(),
        "alpha1": by_head[..., 0].mean().item(),
        "constant_alpha": by_head[..., 1].mean().item(),
        "builder_activation": means.of[builder[0]]["builder"].item(),
        "largest": max(largest.values()),
    }
    return row | losses, largest, by_head


@torch.inference_mode()
def alpha_and_loss(model, tokens: torch.Tensor, positions=(1,), before=0, on_state=None):
    """alpha, (n, L, H, K), at K positions of tokens (n, T), and their mean losses in nats, as columns.

    The first `before` tokens precede the text, whose second token is always the first that is predicted.
    """
    alphas, early, later = [], 0.0, 0.0
    for part in attention.batches(tokens):
        alpha, states = attention.attention_to(model, part, positions, on_state)
        alphas.append(alpha.cpu())
        states, targets = states[:, before:-1], part[:, before + 1 :]  # a state predicts the next token
        early += model.summed_loss(states[:, :EARLY].flatten(0, 1), targets[:, :EARLY].flatten()).item()
        later += model.summed_loss(states[:, EARLY:].flatten(0, 1), targets[:, EARLY:].flatten()).item()
    n, count = len(tokens), tokens.shape[1] - before - 1  # predictions of each sequence
    from_ninth = later / (n * (count - EARLY)) if count > EARLY else None
    return torch.cat(alphas), {"loss": (early + later) / (n * count), "loss_from_ninth": from_ninth}
