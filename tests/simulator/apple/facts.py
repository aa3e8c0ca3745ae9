"""Facts about Apple's GPUs and their sources: the numbers that the model reads, and prints with --facts.

"known": measured or documented for the chips named. "inferred": concluded here from published measurements.
"assumed": nobody outside of Apple knows; the value is plausible.
"""

from dataclasses import dataclass

M1, M2, M3, M5 = 7, 8, 9, 10  # Apple GPU families; M4 is of M3's
METAL_BENCHMARKS = "philipturner/metal-benchmarks, README"
MESA = "Mesa, src/asahi/compiler (Rosenzweig 2023)"
APPLEGPU = "dougallj/applegpu, instruction documentation"


@dataclass(frozen=True)
class Fact:
    name: str
    value: object
    status: str  # known, inferred, assumed
    chips: str
    source: str


FACTS: list[Fact] = []


def fact(name: str, value, status: str, chips: str, source: str):
    """Adds a row to the table. Returns: its value."""
    FACTS.append(Fact(name, value, status, chips, source))
    return value


LANES = fact("lanes of a simdgroup", 32, "known", "all", "Metal feature set tables")
SCHEDULERS = fact(
    "schedulers of a core, each issues an instruction of a simdgroup a cycle",
    4,
    "known",
    "M1, M2; assumed for later",
    METAL_BENCHMARKS,
)
L1_BYTES = {
    M1: fact(
        "L1: bytes a cycle and core, in sectors of 32",
        64,
        "known",
        "M1, M2",
        f"{METAL_BENCHMARKS}; chipsandcheese.com 2023-10-31",
    ),
    M3: fact(
        "L1: bytes a cycle and core, later",
        128,
        "inferred",
        "M3, M4; assumed for M5",
        "64 contradicts the times of mlx #3863",
    ),
}
SECTOR_BYTES = fact("L1: bytes of a sector", 32, "assumed", "all", "fits mlx #3967")
THREADGROUP_BYTES = fact(
    "threadgroup memory: bytes a cycle and core", 64, "assumed", "all", "'TBD' in metal-benchmarks"
)
DRAM_REACH = fact(
    "DRAM: part of the specified bandwidth that reads reach",
    0.86,
    "known",
    "M1 Pro, M3 Ultra, M3 Max",
    "omlx #2238, mlx #3967, mlx #3863; one M3 Ultra 0.55 to 0.63 (mlx #4509)",
)
DRAM_REACHES = {
    "M1 Max": fact("DRAM: the same of an M1 Max", 0.80, "known", "M1 Max", "0.78 to 0.83 in llama.cpp #2188"),
    "M5 Max": fact("DRAM: the same of an M5 Max", 0.78, "known", "M5 Max", "478 of 614 GB/s in mlxcel #358"),
}
START_US = fact(
    "start and end of a dispatch that waits for the one before, us; of a token, not of a kernel's bounds",
    (3, 6),
    "inferred",
    "all",
    "1.3 to 2.05 at best (kryptic-sh/infr #14, penta2himajin/qwisp #143), 10 with a kernel on an M5 Pro "
    "(mlx-lm #1676)",
)
ULTRA_START_US = fact(
    "the same of an Ultra, whose two dies have to agree",
    (5.4, 6),
    "inferred",
    "M1 to M3 Ultra",
    "a review of this package in November 2026; nobody has published one",
)
TENSOR_MACS = fact(
    "tensor units: multiply-adds of 16-bit operands a cycle and core",
    512,
    "assumed",
    "M5",
    "gpu-forge #15; an M5 Max would reach 66 TFLOPS, of which mlx-serve #366 measured 50",
)
CACHE_LINE_BYTES = fact("L1: bytes of a line", 128, "known", "M1", METAL_BENCHMARKS)
LINES_A_CYCLE = fact(
    "L1: lines a cycle and core that loads touch, each line once a load",
    3,
    "inferred",
    "M3 Max; assumed for all",
    "the fewest that fit mlx #3863: at one, qmv_wide of 8 rows would take 0.9 ms in place of 0.32",
)
BANKS = fact(
    "threadgroup memory: banks of 4 bytes, each serves one word a cycle",
    32,
    "inferred",
    "M3 Pro; assumed for all",
    "8-way conflicts of strides of 8 and 64 floats, gone with 4 floats of padding (Metal.jl #832)",
)
EXPERT_READS = fact(
    "reads of a token's experts: part of the rate that other reads reach",
    (0.60, 0.75),
    "inferred",
    "all",
    "mlx #4509: 258 GB/s alone and 387 chained, where plain reads reach 454 to 514 on an M3 Ultra",
)
LINE_BYTES = fact("bytes of memory that are fetched at once", 64, "assumed", "all", "half of the cache line")
LOAD_COMPONENTS = fact(
    "device load: at most so many values of 8, 16 or 32 bits a lane", 4, "known", "M1", f"{APPLEGPU}"
)
ADDRESS_SHIFT = fact(
    "index of an address, and second operand of an integer add: shifted by up to",
    4,
    "known",
    "M1",
    APPLEGPU,
)
NATIVE_BF16 = fact(
    "bfloat16 arithmetic, from this GPU family on", M3, "inferred", "M3", "Metal feature tables"
)
BF16_WIDENING = fact("bfloat16 to float before that: instructions", 1, "inferred", "M1, M2", "a shift by 16")
BF16_ROUNDING = fact(
    "float to bfloat16 before that: instructions", 5, "inferred", "M1, M2", "round to even, NaN kept"
)
_THREADS = (
    *((104, 1024), (112, 896), (128, 832), (136, 768), (144, 704), (160, 640), (184, 576), (208, 512)),
    *((232, 448), (256, 384)),
)
REGISTER_TABLE = fact(
    "threads of a core by the 16-bit halves of registers that each takes",
    _THREADS,
    "known",
    "M1, M2; allocated dynamically from M3 on",
    f"{MESA}, agx_occupancy",
)
fact(
    "not modelled",
    "spilling, the compiler's order of loads, instruction cache (12 KB), contention, changing clocks, "
    "hits in L2 and SLC between threadgroups, M3's two instructions a cycle",
    "known",
    "all",
    "dispatches under 50 us are not predicted",
)
fact("DRAM latency (ns); not in the model", (342, 400), "known", "M2 Pro", "chipsandcheese.com")
fact(
    "simdgroups a core for full rate without independent instructions; `Measurement.range_us` has it",
    24,
    "known",
    "M1",
    METAL_BENCHMARKS,
)


REGISTERS = {
    "M1": fact("registers of a thread, beyond which it spills", 128, "known", "M1, M2", MESA),
    "M3": fact("the same from the M3 on, until metal-tt says it", 96, "assumed", "M3", "as the M4"),
    "M4": fact("the same of an M4", 96, "inferred", "M4 Pro", "two independent studies of metal-tt's files"),
    "M5": fact("the same of an M5", 124, "inferred", "M5", "the same two"),
}
REGISTERS["M2"] = REGISTERS["M1"]


@dataclass(frozen=True)
class Cost:
    """What an instruction of a simdgroup takes: of its scheduler's issue slots, and of one pipe's cycles."""

    slots: float
    pipe: str = ""  # "complex", "shuffle"; none for what issue alone bounds
    cycles: float = 0


COSTS: dict[str, Cost] = {}


def cost(
    names: str, slots, status: str, source: str, pipe: str = "", cycles=0, chips: str = "M1", note=""
) -> None:
    """Adds a row for classes of instructions: `names` separated by spaces."""
    value = Cost(slots, pipe, cycles)
    for name in names.split():
        COSTS[name] = value
    text = f"{slots} slots" + (f", {cycles} cycles of the {pipe} pipe" if pipe else "")
    fact(f"cost of {names}{note and f' ({note})'}", text, status, chips, source)


_COMPLEX_SLOTS = 2
fact(
    "issue slots of an instruction of the complex pipe",
    _COMPLEX_SLOTS,
    "inferred",
    "M1",
    f"{METAL_BENCHMARKS}: one with 3 simple ones takes 4.9 to 5.4 cycles, with 4 5.6 to 6.1",
)
_complex = {"pipe": "complex", "chips": "M1"}
cost("fma fadd fmul fother", 1, "known", METAL_BENCHMARKS, chips="M1")
cost("iadd logic mov select cmp", 1, "known", METAL_BENCHMARKS)
cost("iadd64", 4, "known", f"{METAL_BENCHMARKS}: 4.7 cycles")
cost(
    "shift bfe imul convert popcount transc", _COMPLEX_SLOTS, "known", METAL_BENCHMARKS, cycles=4, **_complex
)
cost("shiftvar imul64", _COMPLEX_SLOTS, "known", METAL_BENCHMARKS, cycles=8, **_complex)
cost("recip", _COMPLEX_SLOTS, "known", METAL_BENCHMARKS, cycles=6, **_complex)
cost("rsqrt", _COMPLEX_SLOTS, "known", METAL_BENCHMARKS, cycles=8, **_complex)
cost("bfwiden bfround", 1, "inferred", "one of the instructions above", chips="M1, M2")
cost("branch", 2, "assumed", "a mask is pushed or popped")
cost("shuffle ballot", 1, "known", METAL_BENCHMARKS, "shuffle", 2, note="xor, rotate, up, down, broadcast")
cost("simdsum", 10, "known", f"{METAL_BENCHMARKS}: 14.5 cycles in a chain", "shuffle", 10)
cost("scan", 8, "assumed", "like simdsum", "shuffle", 8)
cost("mma16", 17, "known", METAL_BENCHMARKS, chips="M1, M2", note="8x8x8, half or bfloat operands")
cost("mma32", 18, "known", METAL_BENCHMARKS, chips="M1, M2", note="8x8x8, float operands")
cost("barrier", 4, "assumed", "not published")
cost("simdbarrier", 0, "assumed", "lanes run in lockstep")
cost("devload devstore tgload tgstore private atomic", 1, "assumed", "an instruction of the memory pipe")
cost("constload", 0, "inferred", "uniform registers are filled before the threads start")
cost(
    "anyshuffle",
    30,
    "known",
    f"{MESA}: lowered to quads; 28 to 32 cycles",
    "shuffle",
    30,
    "M1, M2",
    "any lane",
)
cost("anyshuffle3", 1, "assumed", "as other shuffles", "shuffle", 2, "M3 on", "any lane")


@dataclass(frozen=True)
class Gpu:
    """A chip's GPU. `gbs` is the specified bandwidth of memory in GB/s."""

    name: str
    family: int  # Apple GPU family: M1 7, M2 8, M3 and M4 9, M5 10
    cores: int
    ghz: float
    gbs: float

    @property
    def has_tensor_units(self) -> bool:
        return self.family >= M5

    @property
    def native_bf16(self) -> bool:
        return self.family >= NATIVE_BF16

    @property
    def l1_bytes(self) -> int:
        return L1_BYTES[M3 if self.family >= M3 else M1]

    @property
    def dram_bytes_per_us(self) -> float:
        return self.gbs * DRAM_REACHES.get(self.name, DRAM_REACH) * 1e3

    @property
    def core_cycles_per_us(self) -> float:
        return self.cores * self.ghz * 1e3


GPUS: dict[str, Gpu] = {}


def gpu(name: str, family: int, cores: int, ghz: float, gbs: float, status: str = "known") -> None:
    GPUS[name] = Gpu(name, family, cores, ghz, gbs)
    source = f"{METAL_BENCHMARKS}; Apple's specifications; hmc-tech.com"
    fact(f"{name}: cores, GHz, GB/s", (cores, ghz, gbs), status, name, source)


gpu("M1", M1, 8, 1.278, 68.25)
gpu("M1 Pro", M1, 16, 1.296, 204.8)
gpu("M1 Pro 14", M1, 14, 1.296, 204.8)
gpu("M1 Max", M1, 32, 1.296, 409.6)
gpu("M1 Ultra", M1, 64, 1.296, 819.2)
gpu("M2", M2, 10, 1.398, 102.4)
gpu("M2 Pro", M2, 19, 1.398, 204.8)
gpu("M2 Max", M2, 38, 1.398, 409.6)
gpu("M2 Ultra", M2, 76, 1.398, 819.2)
gpu("M3", M3, 10, 1.398, 102.4)
gpu("M3 Pro", M3, 18, 1.398, 153.6)
gpu("M3 Max", M3, 40, 1.398, 409.6)
gpu("M3 Ultra", M3, 80, 1.398, 819.2)
gpu("M4", M3, 10, 1.47, 120.0, "inferred")  # clocks of the M4 to 6 %: sources differ
gpu("M4 Pro", M3, 20, 1.578, 273.0, "inferred")
gpu("M4 Max", M3, 40, 1.578, 546.0, "inferred")
gpu("M5", M5, 10, 1.578, 153.6, "assumed")  # tensor units by TENSOR_MACS
gpu("M5 Max", M5, 40, 1.62, 614.0, "assumed")


def threads_for(halves: int) -> int:
    """The threads of a threadgroup that M1's registers allow; 0 where a thread needs more than it can get."""
    return next((threads for limit, threads in REGISTER_TABLE if halves <= limit), 0)


def table() -> str:
    """All facts, one a line."""
    lines = [
        f"{f.status:8}  {f.name}: {f.value}  [{f.chips}; {f.source}]"
        for f in sorted(FACTS, key=lambda f: ("known", "inferred", "assumed").index(f.status))
    ]
    return "\n".join(lines)
