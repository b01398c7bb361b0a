"""What do the tables of README and docs say? Each is written anew from the results, below its mark.

<!-- table: cost, written from results/cost.json -->
"""

import re
from pathlib import Path

import pandas as pd
from scipy.stats import norm

from lib.files import atomic_file
from measure.cosines import interval
from measure.lineage import CERTAIN_Z
from measure.verdict import SAME_BIRTH
from reproduce.claims import CLAIMS, FAILS, HOLDS, NONE, OPEN
from reproduce.rivals import RIVALS, THRESHOLD

ROOT = Path(__file__).parent.parent
MARKED_TABLE = re.compile(r"(<!-- table: ([\w ]+), .*-->\n)(\|.*\n)+")
LEVEL = 0.01  # of significance
ANSWERS = {HOLDS: "seen", FAILS: "not seen", OPEN: "open", NONE: "measured, no verdict"}
UNCLAIMED = ("bench", "memory", "measured/memory")  # results that tables read, and no claim
PAPER_SCALE = ("ten_thousand/probe", "probe", "nano_llama/probe", "gpt2_1b/probe", "lengths/probe")
PAPER_SCALE = tuple(f"paper_scale/{name}" for name in PAPER_SCALE)


def write_tables(results) -> None:
    """Write the tables of README and docs/; `results` maps the name of each result to what its JSON holds."""

    def table(match):
        return match[1] + markdown(TABLES[match[2]](results))

    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        written = MARKED_TABLE.sub(table, path.read_text())
        with atomic_file(path) as temporary:
            temporary.write_text(written)


def markdown(table: pd.DataFrame):
    """The text of a table."""
    lines = [table.columns, ["---"] * len(table.columns), *table.to_numpy(dtype=object)]
    return "".join(f"| {' | '.join(map(cell, line))} |\n" for line in lines)


def cell(value):
    """The text of a cell: four digits of a number, all those of a whole one."""
    if isinstance(value, str):
        return value
    if pd.isna(value):
        return "n/a"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def preference(results):
    """How much a favourite depends on the model, the seed and the number of sequences."""
    rows = []
    for name in ("probe", "ten_thousand/probe", "gpt2_1b/probe", "nano_llama/probe", "centered/probe"):
        scheme = results[name]["settings"]["init"]
        rows += [row | {"drawn by": scheme} for row in results[name]["rows"]]
    return favourites(rows, "drawn by")


def paper_scale(results):
    """BB Table 1 at its own length, as far as it was made."""
    rows = []
    for name in PAPER_SCALE:
        if name in results:
            rows += results[name]["rows"]
    return favourites(rows, "sequence_length")


def favourites(rows, varied):
    """A table of probe.py's rows, with a column for what was varied."""
    headings = {
        "model": "model",
        "seed": "seed",
        varied: varied.replace("sequence_length", "tokens"),
        "num_sequences": "sequences",
        "top1_count": "favourite's count",
        "uniform_max_count": "luckiest of uniform draws",
        "ratio": "ratio",
        "log10_p": "log10 p",
        "mean_cosine": "mean cosine",
    }
    return pd.DataFrame(rows)[[*headings]].rename(columns=headings)


def error_rates(results):
    """The percentage of strangers that each test calls kin, with its interval."""
    table = with_percentages(results["errors"]["rows"])
    table["births"] = table["model"] + ", " + table["scheme"]
    rates = table.pivot_table("text", ["inputs", "test"], "births", aggfunc="first", sort=False)
    return rates.fillna("as gpt2").reset_index()


def headline(results):
    """The percentage of newborns with tables of their own that each test calls kin."""
    names = {
        "units": "hidden units found again",
        "weights": "coordinates of weights",
        "relabelling": "coordinates of states",
        "t-test": "the paper's t-test",
        "U-test": "the paper's U-test",
        "closed form": "the closed form of its code",
    }
    table = with_percentages(results["errors"]["rows"])
    table = table[table["inputs"].isin(["own embedding", "weights"]) & (table["scheme"] == "gpt2")]
    rates = table.pivot_table("text", "test", "model", aggfunc="first").reindex([*names])
    return rates.rename(names).reset_index()


def with_percentages(rows):
    """A table of error rates, with `text`: each rate and its interval in %."""
    table = pd.DataFrame(rows)
    percent = (100 * table[["rate", "low", "high"]]).map("{:.1f}".format)
    table["text"] = percent["rate"] + " (" + percent["low"] + " to " + percent["high"] + ")"
    return table


def power(results):
    """Up to which strength of each change, of those tried, every test still recognises a child."""
    table = pd.DataFrame(results["power"]["rows"])
    table["units found again"] = table["verdict"] == SAME_BIRTH
    table["weights"] = table["body_z"] > CERTAIN_Z
    table["states"] = table["relabel_z"] > CERTAIN_Z
    table["the paper's closed form"] = table["closed_form_z"] > norm.isf(LEVEL)
    tests = ["units found again", "weights", "states", "the paper's closed form"]
    rows = []
    for change, part in table.groupby("change", sort=False):
        if part["strength"].map(type).eq(str).any():
            continue  # ways of hiding have no order
        row = {"change": change, "tried": ", ".join(map(cell, part["strength"]))}
        for test in tests:
            passed = part["strength"][part[test].cummin()]
            row[test] = cell(passed.iloc[-1]) if len(passed) else "none"
        rows.append(row)
    return pd.DataFrame(rows)


def lineage_methods(results):
    """In each of BB's tables, how many pairs each method calls rightly kin or strangers."""
    table = pd.DataFrame(results["lineage"]["rows"])
    tests = {"paper_t_p": "t-test", "paper_u_p": "U-test", "permutation_p": "relabelling"}
    says_kin = table[[*tests]].rename(columns=tests) < LEVEL
    says_kin[[*RIVALS]] = table[[*RIVALS]] >= THRESHOLD
    says_kin["compare"] = table["verdict"] == SAME_BIRTH
    right = says_kin.eq(table["kin"], axis=0)
    right.insert(0, "kin", table["kin"])
    right.insert(1, "strangers", ~table["kin"])
    return right.groupby(table["table"], sort=False).sum().reset_index()


def cost(results):
    """Tokens and seconds until each test recognises a child."""
    table = pd.DataFrame(results["cost"]["rows"]).sort_values("tokens")
    return table[["test", "tokens", "times_fewer_tokens", "seconds", "log10_p"]]


def calibrations(results):
    """Loss, sinks and what foretells them, for every calibration: means over seeds, with 95 % intervals."""
    columns = (
        "val_loss",
        "text_loss",
        "mean_alpha1",
        "sink_rate",
        "norm_ratio",
        "value_ratio",
        "first_share",
    )
    return means_of_runs(results["calibrations"]["rows"], columns)


def links(results):
    """SO's links at birth and after training, in the mean of layers, for every calibration."""
    columns = ("birth_disparity", "disparity", "birth_effective_rank", "effective_rank")
    columns += ("birth_output_tau", "output_tau")
    return means_of_runs(results["calibrations"]["rows"], columns)


def means_of_runs(runs, columns):
    """A row for each configuration and calibration: means of some columns over seeds, and their intervals."""
    rows = []
    groups = pd.DataFrame(runs).groupby(["config", "calibration"], sort=False)
    for (config, kind), part in groups:
        row = {"trained on": config, "calibration": kind, "seeds": len(part)}
        for column in columns:
            mean = interval(part[column])
            error = mean["high"] - mean["mean"]
            digits = 1 if mean["mean"] > 20 else 3
            row[column] = f"{mean['mean']:.{digits}f} ± {error:.{digits}f}"
        rows.append(row)
    return pd.DataFrame(rows).replace("nan ± nan", "n/a")


def structural_origin(results):
    """What SO states, and what was seen of it here."""
    rows = []
    for claim in CLAIMS:
        if not claim.item.startswith("SO"):
            continue
        answer, measured = "cannot be asked here", ""
        if claim.result is not None:
            measured, verdict = claim.measure(results[claim.result])
            answer = ANSWERS[verdict]
        rows.append(
            {
                "SO": f"{claim.item.removeprefix('SO: ')}: {claim.says}",
                "its number": claim.number,
                "answer": answer,
                "measured": measured,
            }
        )
    return pd.DataFrame(rows)


def memory(results):
    """What is alive at the peak of a training step, in GiB."""
    table = pd.DataFrame(results["memory"]["rows"])
    table["parameters"] = (table["parameters"] / 1e6).map("{:,.0f}M".format)
    table.columns = [name.removesuffix("_gib").replace("_", " ") for name in table]
    return table


def measured_memory(results):
    """The peak of a training step worked out and measured, in GiB."""
    table = pd.DataFrame(results["measured/memory"]["rows"])
    headings = {
        "model": "model",
        "micro_batch_size": "micro batch size",
        "sequence_length": "sequence length",
        "total_gib": "worked out",
        "measured_gib": "measured",
        "ratio": "ratio",
    }
    return table[[*headings]].rename(columns=headings)


def bench(results):
    """Tokens a second, ours and those of transformers."""
    table = pd.DataFrame(results["bench"]["rows"])
    spread = table[["ratio", "lowest", "highest"]].map("{:.2f}".format)
    table["ratio"] = spread["ratio"] + " (" + spread["lowest"] + " to " + spread["highest"] + ")"
    table["share"] = table["share"].map("{:.0%}".format)
    headings = {
        "work": "work",
        "model": "model",
        "batch_size": "batch",
        "sequence_length": "tokens",
        "dtype": "dtype",
        "ours": "ours",
        "transformers": "transformers",
        "ratio": "ratio",
        "share": "of the limit",
    }
    return table[[*headings]].rename(columns=headings)


TABLES = {  # by the name in their mark
    "preference": preference,
    "paper scale": paper_scale,
    "error rates": error_rates,
    "headline": headline,
    "power": power,
    "lineage methods": lineage_methods,
    "cost": cost,
    "calibrations": calibrations,
    "links": links,
    "structural origin": structural_origin,
    "memory": memory,
    "measured memory": measured_memory,
    "bench": bench,
}
