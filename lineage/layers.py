"""What is in a layer? Its MLPs, its router, and what cannot be looked at. (ours)

What an MLP's matrices do is told by their names if these are known ones, else by their shapes: one matrix
writes to the stream what one or two others read from it.
"""

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from lineage.names import (
    ATTENTION,
    EXPERT,
    ROUTER,
    WRITE,
    adapters_among,
    expert_key,
    is_along,
    is_called,
    owner_of,
    size_of,
)

MLP_ROLES = ("gate", "up", "gate_up", "down")
UNGATED = {"up", "down"}  # the roles in an MLP without a gate
OF_ATTENTION = 4  # matrices that a layer without an MLP has


class MLP(NamedTuple):
    """An MLP of a layer, or one of its experts."""

    matrices: dict  # the names of its matrices by role: gate, up, down, or gate_up and down, or up and down
    is_named: bool  # does a name, or a gate, tell which matrix writes? If not, this is a guess
    index: int | None  # its place in a stack of experts, if these are one tensor
    number: int | None  # of an expert, by its name or its place


@dataclass(frozen=True)
class Layer:
    """The tensors of a layer."""

    names: dict  # full names by the rest of the name; adapters are not among them
    mlps: tuple
    router: str | None  # the matrix (experts, d) that chooses experts
    size: int  # numbers in it
    unread: dict  # what of it cannot be looked at: how many numbers

    @functools.cached_property
    def experts(self):
        """The MLPs that are experts, by number."""
        return {mlp.number: mlp for mlp in self.mlps if mlp.number is not None}


def layer_of(names, shapes, width):
    """The Layer of some tensors, {rest: full name}, in a stream of a width."""
    added = {*adapters_among(names, shapes)}
    kept = {}
    for rest, full in names.items():
        if full not in added:
            first = EXPERT.sub(r"\2.\1", rest.replace(".base_layer", ""))  # an expert's number stands first
            kept[first] = full
    mlps, is_product = mlps_of(kept, shapes, width)
    others = [rest for rest, full in kept.items() if len(shapes[full]) > 1]
    unknown = [rest for rest in others if not ATTENTION.search(rest)]
    unread = {"adapters": size_of(added, shapes)}
    if mlps:
        # What neither reads the stream, nor writes to it, nor is part of an MLP, as Mamba's x_proj is
        read = set()
        for mlp in mlps:
            read.update(mlp.matrices.values())
        owners = {owner_of(rest) for rest, full in kept.items() if full in read}
        off = []
        for rest in unknown:
            if owner_of(rest) not in owners and not is_along(kept[rest], shapes[kept[rest]], width):
                off.append(kept[rest])
        unread["matrices beside the stream"] = size_of(off, shapes)
    else:
        unknown = [kept[rest] for rest in unknown or others[OF_ATTENTION:]]
        what = "MLPs stored as products" if is_product else "layers without an MLP that can be read"
        unread[what] = size_of(unknown, shapes)
    router = router_of(kept, mlps, shapes, width)
    return Layer(kept, tuple(mlps), router, size_of(names.values(), shapes), unread)


def mlps_of(names, shapes, width):
    """A layer's MLPs; and is its MLP stored as products?

    {"mlp.up_proj.weight": (704, 256), "mlp.down_proj.weight": (256, 704), ...} is one MLP of owner "mlp".
    """
    plain, stacked = {}, {}  # along the stream, of an MLP each, or of a stack of experts
    inner, squares = Counter(), Counter()  # as `is_rank` asks for them
    for rest, full in names.items():
        shape = shapes[full]
        if len(shape) not in (2, 3) or ATTENTION.search(rest):
            continue
        if width not in shape[-2:]:
            inner[min(shape[-2:])] += 1
        elif shape[-2:] == (width, width):
            squares[owner_of(rest)] += 1
        if is_along(full, shape, width):
            (plain if len(shape) == 2 else stacked)[rest] = shape
    mlps = []
    for roles in all_roles(plain, width):
        if is_rank(roles, plain, width, inner, squares):
            return [], True
        mlps.append(made_mlp(roles, names, None, expert_key(roles["down"])[1]))
    if len(mlps) == 1:  # a number in its name is no expert's
        mlps = [mlps[0]._replace(number=None)]
    for roles in all_roles(stacked, width):
        if is_rank(roles, stacked, width, inner, squares):
            return [], True
        for index in range(stacked[roles["down"]][0]):
            mlps.append(made_mlp(roles, names, index, index))
    return mlps, False


def made_mlp(roles, names, index, number):
    """The MLP of some roles."""
    is_named = roles.keys() != UNGATED or is_called(roles["down"], WRITE)
    matrices = {role: names[rest] for role, rest in roles.items()}
    return MLP(matrices, is_named, index, number)


def all_roles(shapes, width):
    """The roles of each MLP among some matrices: of those of one owner, or else of all together."""
    owners = defaultdict(dict)
    for rest, shape in shapes.items():
        owners[owner_of(rest)][rest] = shape
    found, whole = [], []
    for members in owners.values():
        roles = roles_of(members, width)
        if roles:
            found.append(roles)
            if len(roles) == len(members):
                whole.append(roles)
    if not found:
        together = roles_of(shapes, width)
        return [together] if together else []
    # An MLP is all that its owner has, while two matrices of an attention may look like one;
    found = whole or found
    # and one that a name tells is surer than one that shapes tell.
    named = [roles for roles in found if is_called(roles["down"], WRITE)]
    return named or found


def roles_of(shapes, width):
    """The matrices of one MLP by role, {} if these are none."""
    writers = [rest for rest in shapes if is_called(rest, WRITE)]
    if writers and not names_mislead(writers, shapes):
        return roles_by_name(shapes, width, writers)
    return roles_by_shape(shapes, width)


def names_mislead(writers, shapes):
    """Is the one called a writer of another's shape, and the third is not? xFormers' w3 writes, not w2."""
    counts = Counter(shapes.values())
    return sorted(counts.values()) == [1, 2] and any(counts[shapes[rest]] == 2 for rest in writers)


def roles_by_name(shapes, width, writers):
    """The roles of matrices, of which some are called writers."""
    readers = [rest for rest in shapes if rest not in writers]
    return joined(readers, writers, shapes, width)


def roles_by_shape(shapes, width):
    """The roles of matrices, of which shapes tell the writer; a square one's tells nothing.

    They are stored as (outputs, inputs); or the other way, if more would write than read.
    """
    readers, writers = [], []
    for rest, shape in shapes.items():
        if shape[-1] != shape[-2]:
            (readers if shape[-1] == width else writers).append(rest)
    if len(writers) > len(readers):  # stored as (inputs, outputs)
        readers, writers = writers, readers
    return joined(readers, writers, shapes, width)


def joined(readers, writers, shapes, width):
    """The roles of the first MLP in which one matrix writes what one or two others read; {} if none does."""
    by_units = defaultdict(list)
    for rest in readers:
        by_units[units_of(shapes[rest], width)].append(rest)
    counts = Counter(units_of(shapes[rest], width) for rest in writers)
    for down in writers:
        units = units_of(shapes[down], width)
        inputs = by_units[units]
        if counts[units] > 1:
            continue
        if len(inputs) == 2:
            return {"gate": inputs[0], "up": inputs[1], "down": down}
        if len(inputs) == 1:
            return {"up": inputs[0], "down": down}
        # Both may be in one matrix, in which Mamba-2 has more below them.
        fused = [rest for rest in readers if units_of(shapes[rest], width) >= 2 * units]
        if not inputs and len(fused) == 1:
            return {"gate_up": fused[0], "down": down}
    return {}


def units_of(shape, width):
    """The number of neurons that a matrix, or a stack of experts', has a row or a column for."""
    return shape[-2] if shape[-1] == width else shape[-1]


def is_rank(roles, shapes, width, inner, squares):
    """Is an MLP's number of neurons the rank of matrices that are stored as products, U V?

    Then beside each matrix along the stream stands one of which it is the smaller size, as `inner` counts
    them; or, if it is the width, a square one of the same owner, as `squares` counts them.
    """
    if inner[units_of(shapes[roles["down"]], width)] >= len(roles):
        return True
    beside = sum(squares[owner] for owner in {owner_of(rest) for rest in roles.values()})
    own = sum(shapes[rest][-2:] == (width, width) for rest in roles.values())
    return beside - own == len(roles)


def router_of(names, mlps, shapes, width):
    """The name of the matrix that chooses a layer's experts; None without one."""
    numbers, taken = set(), set()
    for mlp in mlps:
        numbers |= {mlp.number} - {None}
        taken.update(mlp.matrices.values())
    count = len(numbers)
    fitting = []
    for full in names.values():
        if count > 1 and full not in taken and shapes[full] in ((count, width), (width, count)):
            fitting.append(full)
    called = [full for full in fitting if is_called(full, ROUTER)]
    return next(iter(called or fitting), None)
