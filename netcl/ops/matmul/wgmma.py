"""Products by wgmma, the instructions of compute capability 9.0 that multiply matrices in local memory: a tier of its own.

16-bit operands are multiplied as they are. float32 operands are split into two TF32 values, whose three products are summed per slice
of 32 and added in float32: the error is below that of a plain float32 sum from a few hundred terms on.

The kernels (wgmma.cl) copy 16 bytes at a time, so rows and batches of both operands must start at multiples of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from netcl.core.capabilities import DeviceProfile
from netcl.core.dtype import DTYPES
from netcl.core.kernel_selector import KernelConfig, KernelVariant
from netcl.ops.finish import HALVES
from netcl.ops.matmul import gemm, nvidia
from netcl.ops.matmul.gemm import Launch, Plan, Product

V = KernelVariant
TIER = "wgmma"
CAPABILITY = (9, 0)
LEAST_WORK = 2**26  # multiply-adds: below, three warpgroups take longer to begin than smaller tiles take for all of it
ROWS, ITEMS = 128, 384  # of a tile, of a work-group: as in wgmma.cl
_RING = 192 * 1024  # bytes of local memory for stages; static arrays may have 224 KB, whatever the driver reports
_INSTRUCTION = {"float32": "tf32", "float16": "f16", "bfloat16": "bf16"}


class Tile(NamedTuple):
    """What a work-group computes at a time: 128 x ``columns`` of the result, of its transpose where ``swapped``, over a part of k.

    ``rate`` is how many multiply-adds such tiles do in the time of one of the fastest of its kind.
    """

    columns: int
    swapped: bool = False
    splits: int = 1
    rate: float = 1.0

    def count(self, p: Product) -> int:
        rows, columns = (p.n, p.m) if self.swapped else (p.m, p.n)
        return p.batches * -(-rows // ROWS) * -(-columns // self.columns) * self.splits

    def stages(self, p: Product) -> int:
        parts = 2 if DTYPES[p.a].itemsize == 4 else 1
        return _RING // ((ROWS + parts * self.columns) * 128)

    def config(self) -> KernelConfig:
        """What names this tile to a tuner."""
        extra = {"tier": TIER, "swapped": int(self.swapped), "splits": self.splits}
        return KernelConfig(V.MATMUL_REGISTER_TILED, ROWS, self.columns, extra=extra)


#: By bytes of a value; rates against the fastest, measured on an H200.
TILES = {
    2: (Tile(256), Tile(128, rate=0.85)),
    4: (Tile(128), Tile(64, rate=0.82), Tile(128, True), Tile(64, True, rate=0.82)),
}
# In multiply-adds of a processor that does one product of 16-bit values after the other; of split float32 it does a fifth of them.
_BEGIN = {2: 2_500_000, 4: 600_000}  # what a tile costs beside its sums
_ADDING, _PER_SUM = {2: 20_000_000, 4: 5_000_000}, {2: 200, 4: 40}  # a second launch, and of all of them, each sum of a part


def takes(p: Product) -> bool:
    """Whether the kernels can do a product: its dtypes, and where its rows begin."""
    size = DTYPES[p.a].itemsize
    whole = 16 // size
    return (
        p.a == p.b and p.a in _INSTRUCTION and p.real == "float" and (p.aligned or p.placed) and p.k > 0
        and not any(value % whole for value in (p.lda, p.ldb, *p.a_strides, *p.b_strides))
        and p.batches * p.m * p.n < 2**31
    )  # fmt: skip


def choices(p: Product, units: int) -> Iterator[Tile]:
    """The tiles of a product's kind, with the parts of k that give every processor one, two, ... of them."""
    steps = -(-p.k * DTYPES[p.a].itemsize // 128)
    for tile in TILES[DTYPES[p.a].itemsize]:
        wanted = {min(times * units // max(1, tile.count(p)), steps // 4) for times in (1, 2, 3)}
        yield from (tile._replace(splits=splits) for splits in sorted({1} | {n for n in wanted if n > 1}))


def cost(p: Product, tile: Tile, units: int) -> float:
    """How long a product takes, as multiply-adds of a processor: tiles in turn, and the addition of parts."""
    size = DTYPES[p.a].itemsize
    depth = -(-p.k // tile.splits)
    sums = ROWS * tile.columns * depth / tile.rate + _BEGIN[size] * tile.columns / 128
    added = _ADDING[size] + _PER_SUM[size] * p.batches * p.m * p.n * (tile.splits + 1) / units if tile.splits > 1 else 0.0
    return -(-tile.count(p) // units) * sums + added


def best(p: Product, units: int) -> Tile:
    """The fastest tile by the model."""
    return min(choices(p, units), key=lambda tile: cost(p, tile, units))


def instruction(name: str, columns: int, dtype: str, turned: tuple[int, int], first: bool = False) -> str:
    """A macro ``name(sums, x, y)``: sums of 64 x ``columns``, ``first`` ones instead of more of them.

    float32 takes x from registers and knows no turned operands; others are told where in local memory x and y lie, and whether turned.
    """
    kind, count = _INSTRUCTION[dtype], columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"{"=" if first else "+"}f"((d)[{i}])' for i in range(count))
    if dtype == "float32":
        x, ins = "{" + ", ".join(f"%{count + i}" for i in range(4)) + f"}}, %{count + 4}", ", ".join(f'"r"((x)[{i}])' for i in range(4))
        shape, tail = f"m64n{columns}k8", ""
    else:
        x, ins, shape, tail = f"%{count}, %{count + 1}", '"l"(x)', f"m64n{columns}k16", f", {turned[0]}, {turned[1]}"
    line = f"wgmma.mma_async.sync.aligned.{shape}.f32.{kind}.{kind} {{{sums}}}, {x}, {int(not first)}, 1, 1{tail};"
    return f'#define {name}(d, x, y) __asm__ volatile("//@sm_90a {line}" : {outs} : {ins}, "l"(y))\n'


def instructions(p: Product, tile: Tile) -> str:
    """What the kernel multiplies by, and the line behind which its sums may be read."""
    # The unit wants rows of the left and columns of the right operand along k; it turns what lies otherwise.
    left, right = (int(p.trans_a), int(not p.trans_b))[:: -1 if tile.swapped else 1]
    macros = [instruction("MULTIPLY", tile.columns, p.a, (left, right))]
    if p.a == "float32":
        macros.append(instruction("MULTIPLY_FIRST", tile.columns, p.a, (0, 0), True))
    kept = ", ".join(f'"+f"((d)[{i}])' for i in range(tile.columns // 2))
    return "".join(macros) + f'#define SETTLED(d) __asm__ volatile("" : {kept})\n'


def plan(queue: Any, p: Product, tile: Tile | None = None, **named: Any) -> Plan:
    """One launch over as many work-groups as there are processors, and one that adds parts where k is split."""
    units = int(queue.device.max_compute_units)
    tile = tile or best(p, units)
    inner = p if tile.splits == 1 else p.bare()
    macros: dict[str, Any] = {
        "COLUMNS": tile.columns, "STAGES": tile.stages(p), "SIZE": DTYPES[p.a].itemsize, "TRANS_A": int(p.trans_a),
        "TRANS_B": int(p.trans_b), "SWAPPED": int(tile.swapped), "C_WIDTH": 1 if tile.swapped else _width(inner),
    }  # fmt: skip
    if inner.c in HALVES:
        macros["PAIR(low, high)"] = f"pair_{inner.c}(low, high)"
    kernel = gemm.compiled(queue, "ptx.cl wgmma.cl", "gemm_wgmma", inner, text=instructions(p, tile), **macros | named)
    args = (*p.sizes(), p.lda, p.ldb, inner.has_bias, *p.strides(), p.batches, tile.splits)
    groups = min(tile.count(p), units)
    first = Launch(kernel, groups * ITEMS, ITEMS, "abdrc" if tile.splits == 1 else "abdrs", args, tile.splits == 1)
    if tile.splits == 1:
        return Plan((first,))
    return Plan((first, gemm.add_parts(queue, p, tile.splits)), sums=tile.splits * p.batches * p.m * p.n)


def _width(p: Product) -> int:
    """Results that a work-item stores at once."""
    return 4 if p.c in HALVES and p.n % 4 == 0 else 2 if p.c == "float32" and p.n % 2 == 0 else 1


def tier(queue: Any, p: Product, profile: DeviceProfile) -> str | None:
    """``"wgmma"`` for a product that this tier takes over."""
    if not nvidia.capable(profile, CAPABILITY, CAPABILITY) or not takes(p) or p.batches * p.m * p.n * p.k < LEAST_WORK:
        return None
    return TIER if nvidia.trusted(queue, TIER, p.a, plan) else None


def _planner(queue: Any, p: Product, config: KernelConfig, profile: DeviceProfile) -> Plan:
    extra = config.extra
    tile = Tile(config.tile_n, bool(extra["swapped"]), extra["splits"]) if "splits" in extra else None
    return plan(queue, p, tile, **extra.get("macros", {}))


gemm.TIERS[TIER] = dict.fromkeys((V.MATMUL_TILED, V.MATMUL_REGISTER_TILED, V.MATMUL_VECTORIZED, V.MATMUL_NAIVE), _planner)
