"""Do the papers hold? Their tables and figures, their number beside ours.

    python paper.py --only lineage      # BB Tables 4a-c, 5, 8-12: trains twelve small models once, 80 minutes

Table 6 needs 7B models that you have on disk: python seedprint.py compare Llama-2-7b-hf vicuna-7b-v1.5
"""

import time
from dataclasses import dataclass, replace

import checkpoint
import common
import findings
import train
from baselines import THRESHOLD
from common import setting
from data import TokenData
from evidence import SAME_BIRTH
from seedprint import Compare, examine, open_models

SEEDS = (42, 123, 1000, 2000)
STEPS = {"tiny_llama": (150, 600, 600, 150), "tiny_qwen": (60, 60, 60, 60)}  # of each seed's training
CONTINUED = {"tiny_llama": 200, "tiny_qwen": 40}  # steps on the second corpus, of seeds 1000 and 123
T_TEST, U_TEST = "paper_t_p", "paper_u_p"
PAPER = {  # p that survive in the paper, a table's rows in order
    ("tiny_llama", "4a", T_TEST): (0.357, 0.678, 0.363, 0.434),
    ("tiny_llama", "4a", U_TEST): (0.532, 0.565, 0.335, 0.481),
    ("tiny_llama", "4b", T_TEST): (2.20e-8, 7.09e-6, 5.58e-4, 4.00e-10),
    ("tiny_llama", "4b", U_TEST): (6.28e-8, 1.37e-5, 2.81e-3, 1.27e-9),
    ("tiny_llama", "4c", T_TEST): (0.385, 0.035, 0.426, 0.388),
    ("tiny_llama", "4c", U_TEST): (0.486, 0.096, 0.337, 0.287),
    ("tiny_qwen", "4a", T_TEST): (0.094, 0.125, 0.451, 0.130),
    ("tiny_qwen", "4a", U_TEST): (0.074, 0.094, 0.529, 0.095),
    ("tiny_qwen", "4b", T_TEST): (7.36e-15, 4.41e-13, 1.06e-24, 4.87e-24),
    ("tiny_qwen", "4b", U_TEST): (3.38e-13, 2.01e-11, 2.05e-19, 1.92e-20),
    ("tiny_qwen", "4c", T_TEST): (0.286, 0.036, 0.026, 0.112),
    ("tiny_qwen", "4c", U_TEST): (0.254, 0.040, 0.043, 0.123),
}
NAMES = {"tiny_qwen": {"4a": "9", "4b": "10", "4c": "11", "5": "12"}, "tiny_llama": {"4b": "4b, 8"}}


@dataclass
class Settings(common.RunSettings):
    """What `paper.py` can be told."""

    only: tuple[str, ...] = setting(("lineage",), "experiments to make", ("lineage",))
    runs: str = setting("runs/lineage", "folder of the training runs, made once and reused")


def trained(s: train.Settings) -> str:
    """The run of these settings, trained if it is not there, taken up again if it was stopped."""
    done = checkpoint.steps(s.out)
    if not done or int(done[-1].name.removeprefix("step_")) < s.max_iters:
        train.train(replace(s, resume=bool(done)))
    return s.out


def family(model: str, s: Settings) -> tuple[dict, dict]:
    """Runs of the four seeds on one corpus in one order, and of two of them continued on a second one."""
    settings, runs = train.Settings(model=model, save_every=50, device=s.device, dtype=s.dtype), s.runs
    first = {}
    for seed, steps in zip(SEEDS, STEPS[model]):
        first[seed] = trained(replace(settings, seed=seed, max_iters=steps, out=f"{runs}/{model}-{seed}"))
    tokenizer = f"{train.data.default_folder(train.data.Settings())}/tokenizer.model"
    second = replace(settings, source=("docstrings",), tokenizer=tokenizer, learning_rate=5e-4)
    second = replace(second, warmup_iters=20, max_iters=CONTINUED[model])
    return first, {
        seed: trained(replace(second, seed=seed, init_from=first[seed], out=f"{first[seed]}-docstrings"))
        for seed in (1000, 123)
    }


def pairs(first: dict, second: dict) -> list[tuple]:
    """(table, base, suspect, whether they are kin) of every row of the tables."""
    born, rows = {seed: f"{run}/step_0000000" for seed, run in first.items()}, []
    for seed, other in zip(SEEDS, (*SEEDS[1:], SEEDS[0])):
        rows.append(("4a", born[seed], born[other], False))  # two newborns
        rows.append(("4b", born[seed], first[seed], True))  # a newborn and its child
        rows.append(
            ("4c", born[other], first[seed], False)
        )  # and another's, of the same data in the same order
    continued = [("5", first[1000], second[seed], seed == 1000) for seed in (1000, 123)]
    return sorted(rows + continued, key=lambda row: row[0])


def lineage(s: Settings) -> dict:
    """BB Tables 4a-c, 5 and 8 to 12: every method's verdict on kin and strangers."""
    options = Compare(paper_test=True, baselines=True, device=s.device, dtype=s.dtype, out=s.out)
    device, dtype = common.start(s)
    started, rows = time.perf_counter(), []
    for model in STEPS:
        listed = pairs(*family(model, s))
        text = TokenData(train.data.default_folder(train.data.Settings()))
        for i, (table, base, suspect, kin) in enumerate(common.progress(listed, desc=model, unit=" pairs")):
            (a, b), vocab = open_models([base, suspect], options)
            row, _ = examine(a, b, options, vocab, text, device, dtype)
            del row["reef_matrix"], row["skipped"]
            says = {name: row[name] < 0.01 for name in (T_TEST, U_TEST)}
            says |= {name: row[name] >= THRESHOLD for name in ("intrinsic", "reef", "pcs", "ics")}
            says |= {"relabelling": row["permutation_p"] < 0.01, "verdict": row["verdict"] == SAME_BIRTH}
            key = dict(table=NAMES[model].get(table, table), base=base, suspect=suspect, kin=kin)
            for name in (T_TEST, U_TEST):
                theirs = PAPER.get((model, table, name))
                row[f"{name}_theirs"] = theirs[i % 4] if theirs else None
            rows.append(key | row | {f"{name}_right": said == kin for name, said in says.items()})
    columns = "table base suspect kin paper_t_p paper_u_p intrinsic reef pcs ics relabel_z body_z verdict"
    made = common.environment(device, dtype, started)
    return common.report(
        s, "lineage", "BB Tables 4, 5, 8-12", rows, findings.lineage(rows), columns, environment=made
    )


EXPERIMENTS = {"lineage": lineage}


def main() -> None:
    """Parse the command line and make the experiments."""
    s = common.parse_settings(Settings, __doc__)
    for name in s.only:
        EXPERIMENTS[name](s)


if __name__ == "__main__":
    common.run(main)
