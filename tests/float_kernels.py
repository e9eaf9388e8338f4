"""What an optimized GPU program computes in floating point, kernel by kernel: two programs with the same kernels round alike.

XLA's choices within a kernel (what it fuses, the order of a sum, its tiles) depend on all that the kernel contains, integers
too. So two programs that are meant to be equal in every bit are compared by the text of their kernels, names and order of the
rest of the program left out.
"""

import collections
import hashlib
import re

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_RESULT = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ")
_FLOATS = re.compile(r"\b(?:f64|f32|bf16|f16|f8\w*)\[")
_CONFIG = re.compile(r"backend_config=\{.*")
_TILES = re.compile(r'"fusion_backend_config":.*?(?=,"force_earliest_schedule")')
_COMMUTING = re.compile(r" (add|multiply|maximum|minimum|and|or|tuple)\(")
"""The results of a kernel with several may stand in any order."""
_BYTES = re.compile(r"\bu8\[\d+,\d+\]")
"""A slab, whose number of blocks changes nothing in a kernel of ours."""
_PARAMETER = re.compile(r"\bparameter\((\d+)\)")
_REMARKS = re.compile(r", (metadata|backend_config|frontend_attributes|control-predecessors)=\{.*")
_MOVES = {
    "bitcast", "broadcast", "call", "compare", "concatenate", "conditional", "constant", "copy", "dynamic-slice",
    "dynamic-update-slice", "fusion", "fusion-done", "fusion-start", "gather", "get-tuple-element", "iota", "opt-barrier", "pad",
    "parameter", "reshape", "reverse", "scatter", "select", "slice", "transpose", "tuple", "while",
}  # fmt: skip
"""Instructions that do not round. A fusion counts by what it contains."""
_BY_ITSELF = {"maximum", "minimum", "multiply", "abs", "negate"}
"""Instructions on floats that give the same number in any company: nothing is summed that a product could be contracted with."""


def float_kernels(hlo: str) -> collections.Counter[str]:
    """Every kernel of `hlo` that computes with floats to how often it stands there."""
    bodies = _computations(hlo)
    inside = {
        called
        for lines in bodies.values()
        for line in lines
        if " call(" not in line  # a command buffer is called, and holds kernels of its own
        for called in re.findall(r"\b(?:calls|to_apply)=%([\w.\-]+)", line)
    }
    kernels: collections.Counter[str] = collections.Counter()
    for name in bodies.keys() - inside:
        for line in bodies[name]:
            called = re.search(r"\bcalls=%([\w.\-]+)", line)
            if called and _computes(bodies[called[1]]):
                tiles = "".join(_TILES.findall(line))
                kernels.update(f"{_canonical(part, bodies)}\n{tiles}" for part in _parts(bodies[called[1]]))
            elif not called and _computes([line]):
                kernels[_canonical([line], bodies)] += 1
    return kernels


def _computations(hlo: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in hlo.splitlines():
        if opened := _COMPUTATION.match(line):
            lines = bodies.setdefault(opened[1], [])
        elif line.startswith(" "):
            lines.append(line)
    return bodies


def _computes(lines: list[str]) -> bool:
    """Whether an instruction that rounds takes or gives floats."""
    return any(_opcode(line) not in _MOVES and _FLOATS.search(_shape(line)) for line in lines)


def _shape(line: str) -> str:
    shape, _, rest = line.partition(" = ")[2].partition(" ")
    while shape.count("(") > shape.count(")"):  # a tuple's shape holds spaces
        more, _, rest = rest.partition(" ")
        shape = f"{shape} {more}"
    return shape


def _opcode(line: str) -> str:
    return line.partition(" = ")[2][len(_shape(line)) + 1 :].partition("(")[0]


def _parts(lines: list[str]) -> list[list[str]]:
    """A kernel whole; or, where it rounds alike whatever it is fused with, what each of its float results depends on."""
    rounding = [line for line in lines if _computes([line])]
    if any(_opcode(line) not in _BY_ITSELF for line in rounding):
        return [lines]
    made = {found[1]: line for line in lines if (found := _RESULT.match(line))}
    uses = {
        line: [made[name] for name in re.findall(r"%([\w.\-]+)", line[line.index(" = ") :]) if name in made] for line in lines
    }

    needed: dict[str, set[str]] = {}
    for line in lines:  # operands stand before their users
        needed[line] = {line}.union(*(needed[operand] for operand in uses[line]))
    inner = set().union(*(needed[line] - {line} for line in rounding))
    return [_renumbered([line for line in lines if line in needed[last]]) for last in rounding if last not in inner]


def _renumbered(lines: list[str]) -> list[str]:
    """Parameters numbered by their order in the kernel, with no gaps."""
    held = sorted({int(number) for line in lines for number in _PARAMETER.findall(line)})
    return [_PARAMETER.sub(lambda found: f"parameter({held.index(int(found[1]))})", line) for line in lines]


def _canonical(lines: list[str], bodies: dict[str, list[str]]) -> str:
    """What `lines`, operands before their users, compute: instructions by their depth, called computations in full.

    Neither names nor the order of instructions nor of commuting operands make a difference.
    """
    structure: dict[str, str] = {}
    """Instruction to a digest of all that it depends on."""
    written: dict[str, tuple[int, str, list[str]]] = {}
    """Digest to depth, text without operands' names, and the operands' digests."""
    for line in lines:
        operands: list[str] = []

        def meaning(found: re.Match[str], operands=operands) -> str:
            if found[1] in structure:
                operands.append(structure[found[1]])
                return "_"
            return f"[{_canonical(bodies[found[1]], bodies)}]" if found[1] in bodies else "operand"

        result = _RESULT.match(line)
        assert result, line
        text = _REMARKS.sub("", line[result.end() :])
        if 'custom_call_target="hisparse_' in line:
            text = _BYTES.sub("u8[N,stride]", text)
        if " fusion(" not in line:  # of a product: its tile along what is summed, or the library's algorithm
            text += "".join(_CONFIG.findall(line))
        commutes = _COMMUTING.search(text)
        text = re.sub(r"%([\w.\-]+)", meaning, text)
        operands = sorted(operands) if commutes else operands
        digest = hashlib.sha256(repr((text, operands)).encode()).hexdigest()
        structure[result[1]] = digest
        written[digest] = 1 + max((written[operand][0] for operand in operands), default=0), text, operands
    order = sorted(written, key=lambda digest: (written[digest][0], digest))
    numbers = {digest: f"v{i}" for i, digest in enumerate(order)}
    return "\n".join(" ".join([numbers[d], "=", written[d][1], *(numbers[o] for o in written[d][2])]) for d in order)
