"""The ideas of the systems, drawn by what computes them where that is possible: ranks by their topologies, passes by the simulator.

``python docs/code/drawings.py`` writes docs/drawings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from svg import BLUE, COLOURS, GREEN, GREY, ORANGE, PALE, VIOLET, Drawing, Point

FOLDER = Path(__file__).parents[1] / "drawings"


def pmm() -> Drawing:
    """3D parallel matrix multiplication on 2 x 2 x 2 ranks."""
    drawing = Drawing(
        880, 390, "A matrix product on 2 x 2 x 2 ranks: each of three matrices lies on one face of a cube of ranks"
    )
    side, deep = 105.0, (58.0, -40.0)
    left, top = 60.0, 118.0

    def at(x: float, y: float, z: float) -> Point:
        return left + x * side + z * deep[0], top + y * side + z * deep[1]

    for i in range(2):
        for j in range(2):
            front = [at(i, j, 0), at(i + 1, j, 0), at(i + 1, j + 1, 0), at(i, j + 1, 0)]
            drawing.shape(front, BLUE)
            middle = at(i + 0.5, j + 0.5, 0)
            drawing.text(middle[0], middle[1] + 5, f"W({j},{i})", size=18, bold=True)
            drawing.text(middle[0], middle[1] + 26, f"rank {i + 2 * j}", size=12)
            drawing.shape([at(i, 0, j), at(i + 1, 0, j), at(i + 1, 0, j + 1), at(i, 0, j + 1)], GREEN)
            middle = at(i + 0.5, 0, j + 0.5)
            drawing.text(middle[0], middle[1] + 5, f"O({j},{i})", size=15, bold=True)
            drawing.shape([at(2, i, j), at(2, i, j + 1), at(2, i + 1, j + 1), at(2, i + 1, j)], ORANGE)
            middle = at(2, i + 0.5, j + 0.5)
            drawing.text(middle[0], middle[1] + 5, f"I({j},{i})", size=15, bold=True)
    corner = at(0, 2, 0)
    drawing.line([(corner[0], corner[1] + 20), (corner[0] + 80, corner[1] + 20)], arrow=True)
    drawing.text(corner[0] + 92, corner[1] + 25, "x")
    drawing.line([(left - 18, top + 40), (left - 18, top + 120)], arrow=True)
    drawing.text(left - 18, top + 138, "y")
    end = at(2, 2, 0)
    drawing.line([(end[0] + 14, end[1] + 8), (end[0] + 14 + deep[0], end[1] + 8 + deep[1])], arrow=True)
    drawing.text(end[0] + 26 + deep[0], end[1] + 10 + deep[1], "z")
    drawing.text(left + side, corner[1] + 62, "rank = x + 2y + 4z", size=13, colour=GREY)
    rows = (
        (
            BLUE,
            "Weights W",
            "split over x (outputs) and y (inputs); of each block,",
            "a rank of z keeps a part: all-gather over z",
        ),
        (ORANGE, "Input I", "tokens split over z, features over y;", "the same on all ranks of x"),
        (GREEN, "Output O = I · W", "tokens over z, features over x; each rank of y", "has a summand: reduced over y"),
    )
    for number, (colour, name, first, second) in enumerate(rows):
        y = 52 + number * 88
        drawing.box(450, y, 24, 24, colour)
        drawing.text(486, y + 18, name, size=17, anchor="start", bold=True)
        drawing.text(486, y + 40, first, size=14, anchor="start")
        drawing.text(486, y + 60, second, size=14, anchor="start")
    drawing.text(450, 338, "gx·gy = 1: FSDP.  gy·gz = 1: Megatron's tensor parallelism.", size=14, anchor="start")
    drawing.text(450, 360, "Beside it: data parallelism over what ranks are left.", size=14, anchor="start")
    return drawing


def ted() -> Drawing:
    """Two views of the same ranks."""
    from ted_moe.topology import Topology

    topology = Topology(world=8, tensor=2, expert=2)
    drawing = Drawing(
        880,
        330,
        "Eight ranks as TED groups them: tensor 2 x data 4 for dense layers, tensor 2 x expert 2 x data 2 for experts",
    )
    views = (
        ("Dense layers: tensor 2 × data 4", lambda rank: topology.data_group(rank)[0], "part", 40),
        ("Experts: tensor 2 × expert 2 × data 2", lambda rank: topology.expert_data_group(rank)[0], "expert", 470),
    )
    for title, same_as, kind, left in views:
        drawing.text(left + 185, 40, title, size=17, bold=True)
        for rank in range(topology.world):
            column, row = divmod(rank, topology.tensor)
            x, y = left + column * 98, 66 + row * 88
            drawing.box(x, y, 76, 62, COLOURS[same_as(rank)])
            drawing.text(x + 38, y + 26, f"rank {rank}", size=14, bold=True)
            expert = topology.expert_group(rank).index(rank)
            said = f"part {row}" if kind == "part" else f"expert {'AB'[expert]}{row}"
            drawing.text(x + 38, y + 47, said, size=13)
            if row:
                drawing.line([(x + 38, y - 26), (x + 38, y)], width=4)
    drawing.text(
        460,
        268,
        "A thick line: ranks that split a layer, and an expert, between them. One colour: ranks whose gradients are summed.",
        size=13,
    )
    first, second = topology.expert_group(0), topology.expert_group(4)
    exchange = f"Tokens go to their experts between ranks {first[0]} and {first[1]}, {second[0]} and {second[1]}, and so on: each sends half,"
    drawing.text(460, 290, exchange, size=13)
    drawing.text(460, 310, "for both ranks of a tensor group hold the same tokens (duplicate token dropping).", size=13)
    return drawing


def samo() -> Drawing:
    """Bytes of a pruned network's state, dense and compressed."""
    drawing = Drawing(
        880,
        360,
        "Training state of a network of which nine tenths are pruned: 16 bytes a parameter dense, 3.6 compressed",
    )
    kept = {(0, 3), (1, 7), (2, 1), (3, 9), (4, 4), (5, 0), (6, 6), (7, 2), (8, 8), (9, 5)}
    drawing.text(40, 40, "16-bit weights: dense, 2 bytes", size=15, bold=True, anchor="start")
    for row in range(10):
        for column in range(10):
            drawing.box(40 + column * 18, 56 + row * 18, 18, 18, BLUE if (row, column) in kept else PALE)
    drawing.text(40, 262, "the model computes with these as ever", size=13, anchor="start")
    drawing.line([(240, 146), (318, 146)], arrow=True)
    drawing.text(279, 136, "index", size=13)
    drawing.text(334, 40, "all else: kept elements only", size=15, bold=True, anchor="start")
    rows = (
        ("index", 2, GREY),
        ("gradients", 2, GREEN),
        ("float32 weights", 4, BLUE),
        ("first moments", 4, ORANGE),
        ("second moments", 4, VIOLET),
    )
    for number, (name, size, colour) in enumerate(rows):
        y = 58 + number * 36
        for element in range(10):
            drawing.box(334 + element * 17, y, 17, 22, colour)
        drawing.text(514, y + 16, f"{name}: {size} bytes", size=14, anchor="start")
    drawing.text(334, 262, "16 bytes for each that is kept", size=13, anchor="start")
    scale, y = 34.0, 286
    for label, bytes_each, colour in (
        ("dense: 16 bytes a parameter", 16.0, ORANGE),
        ("SAMO: 2 + 16 · 0.1 = 3.6 bytes", 3.6, BLUE),
    ):
        drawing.box(40, y, bytes_each * scale, 24, colour)
        drawing.text(52 + bytes_each * scale, y + 17, label, size=14, anchor="start")
        y += 34
    return drawing


def pccl() -> Drawing:
    """An all-gather in two levels."""
    drawing = Drawing(
        880, 350, "An all-gather of eight ranks on four nodes: first between nodes, then within each node"
    )
    titles = ("1. each rank has its block", "2. between nodes", "3. within each node")
    under = ("", "log2(nodes) steps", "over shared memory, or NVLink")
    for stage in range(3):
        left = 40 + stage * 285
        drawing.text(left + 115, 36, titles[stage], size=14, bold=True)
        drawing.text(left + 115, 56, under[stage], size=13)
        for node in range(4):
            y = 74 + node * 62
            drawing.box(left - 4, y - 4, 238, 52, "#ffffff")
            for local in range(2):
                rank = node * 2 + local
                for block in range(8):
                    held = (block == rank, block % 2 == local, True)[stage]
                    drawing.box(left + local * 120 + block * 13, y + 18, 13, 20, COLOURS[block // 2] if held else PALE)
                drawing.text(left + local * 120 + 52, y + 12, f"rank {rank}", size=12)
            if stage == 1 and node < 3:
                for local in range(2):
                    x = left + local * 120 + 52
                    drawing.line([(x, y + 38), (x, y + 62 + 2)], GREY, width=2.5)
    drawing.text(
        440,
        338,
        "Frames are nodes; one colour, the blocks of one node's ranks. Both ranks of a node talk to others at once.",
        size=13,
    )
    return drawing


def pipeline() -> Drawing:
    """The message-driven order beside GPipe's memory and 1F1B's waiting, by the simulator of the suite."""
    from axonn_plugins.pipeline.simulate import simulate

    drawing = Drawing(880, 420, "Three stages and five microbatches: a stage works on whatever has arrived")
    scale = 17.0
    for number, (policy, limit, title) in enumerate(
        (
            ("message_driven", 6, "message-driven: a stage takes whatever has arrived"),
            ("1f1b", None, "1F1B: a stage waits for what its order says"),
        )
    ):
        done = simulate(
            policy, 3, 5, lambda stage, action: 1.0 if action.kind == "forward" else 2.0, lambda *_: 0.6, limit
        )
        top = 30 + number * 190
        drawing.text(40, top + 6, f"{title}; {done.seconds:.1f} units of time", size=15, anchor="start", bold=True)
        for stage, events in enumerate(done.events):
            y = top + 24 + stage * 44
            drawing.text(40, y + 24, f"stage {stage}", size=13, anchor="start")
            drawing.box(100, y, done.seconds * scale * 1.6, 36, PALE)
            for event in events:
                if event.kind in ("forward", "backward"):
                    colour = BLUE if event.kind == "forward" else ORANGE
                    width = (event.end - event.start) * scale * 1.6
                    drawing.box(100 + event.start * scale * 1.6, y, width, 36, colour, str(event.microbatch + 1))
    drawing.box(100, 388, 18, 18, BLUE)
    drawing.text(126, 402, "forward pass of a microbatch", size=13, anchor="start")
    drawing.box(330, 388, 18, 18, ORANGE)
    drawing.text(356, 402, "backward pass, twice as long", size=13, anchor="start")
    drawing.text(560, 402, "A message takes 0.6 of a forward pass.", size=13, anchor="start")
    return drawing


def context() -> Drawing:
    """Chunks of a sequence on four ranks: the triangle of causal attention in equal parts."""
    shared = 4
    drawing = Drawing(
        880,
        380,
        "A sequence in eight chunks on four ranks: rank i has chunks i and 7 - i, so each has as much of the causal triangle",
    )
    side, left, top = 36, 60, 50
    owner = [min(chunk, 2 * shared - 1 - chunk) for chunk in range(2 * shared)]
    cells = [0.0] * shared
    for query in range(2 * shared):
        drawing.text(left - 14, top + query * side + 24, str(query), size=13)
        drawing.text(left + query * side + 18, top + 2 * shared * side + 18, str(query), size=13)
        for key in range(query + 1):
            x, y = left + key * side, top + query * side
            cells[owner[query]] += 0.5 if key == query else 1.0
            if key == query:
                drawing.shape([(x, y), (x + side, y + side), (x, y + side)], COLOURS[owner[query]])
            else:
                drawing.box(x, y, side, side, COLOURS[owner[query]])
    drawing.text(left + 4 * side, 30, "queries (down) see keys (to the right)", size=14, bold=True)
    for rank in range(shared):
        y = 80 + rank * 58
        drawing.box(430, y, 26, 26, COLOURS[rank])
        chunks = [chunk for chunk in range(2 * shared) if owner[chunk] == rank]
        drawing.text(470, y + 13, f"rank {rank} of z", size=15, anchor="start", bold=True)
        drawing.text(
            470,
            y + 32,
            f"chunks {chunks[0]} and {chunks[1]}: {cells[rank]:g} squares of the triangle",
            size=14,
            anchor="start",
        )
    drawing.text(430, 340, "Keys and values travel at once, or by a ring.", size=14, anchor="start")
    return drawing


@dataclass(frozen=True)
class Measured:
    """A step's time beside a peer's, as a README has it.

    Attributes:
        key: the line of the block, as one writes it.
        what: the system and what was timed.
        peer: the other side.
        theirs: its median, in the unit.
        ours: the suite's.
        unit: of both.
        source: the README that has both, with the command.
    """

    key: str
    what: str
    peer: str
    theirs: str
    ours: str
    unit: str
    source: str


MEASURED = (
    Measured(
        '"tensor_parallel": {"gx": 2, "gz": 4}',
        "Step of a GPT: 8 ranks, 4 nodes, 500 Mbit/s",
        "FSDP2",
        "5.710",
        "2.468",
        "s",
        "recipes/axonn_recipes/bench_tp/README.md",
    ),
    Measured(
        '"ted": {"tensor": 2}',
        "Step of a GPT with experts: 8 ranks, 4 nodes, 150 Mbit/s",
        "DeepSpeed-MoE",
        "1887",
        "1732",
        "ms",
        "recipes/axonn_recipes/bench_ted/README.md",
    ),
    Measured(
        '"samo": {"sparsity": 0.9}',
        "Optimizer step: 32 million parameters, 90 % pruned",
        "dense AdamW",
        "24.9",
        "4.8",
        "ms",
        "recipes/axonn_recipes/bench_samo/README.md",
    ),
)


def gain() -> Drawing:
    """Lines of ds_config.json, and a step's time beside a stock peer with what each switches on."""
    drawing = Drawing(
        880,
        322,
        "Three lines of a block in ds_config.json, and for what each switches on a step's time beside that of a stock peer",
    )
    code = "Menlo, Consolas, monospace"
    drawing.box(24, 24, 366, 280)
    drawing.text(44, 50, "ds_config.json", anchor="start", bold=True)
    drawing.text(44, 74, '"axonn": {', size=13, anchor="start", font=code)
    drawing.text(44, 292, "}", size=13, anchor="start", font=code)
    for number, one in enumerate(MEASURED):
        y = 48 + number * 84
        drawing.text(60, y + 54, one.key, size=13, anchor="start", font=code)
        drawing.line([(390, y + 50), (424, y + 50)], arrow=True)
        drawing.text(436, y + 12, one.what, size=13, anchor="start", bold=True)
        for row, (side, value, colour) in enumerate(((one.peer, one.theirs, GREY), ("with it", one.ours, BLUE))):
            top = y + 22 + row * 25
            long = 220 * float(value) / float(one.theirs)
            drawing.text(542, top + 16, side, size=13, anchor="end")
            drawing.box(550, top, long, 22, colour)
            drawing.text(558 + long, top + 16, f"{value} {one.unit}", size=13, anchor="start", bold=bool(row))
    drawing.text(
        436, 316, "Two cores of a CPU; nodes and network emulated on one machine.", size=12, anchor="start", colour=GREY
    )
    return drawing


DRAWINGS = (gain, pmm, ted, samo, pccl, pipeline, context)


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(exist_ok=True)
    for draw in DRAWINGS:
        (FOLDER / f"{draw.__name__}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main()
