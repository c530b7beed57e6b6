#!/usr/bin/env python3
"""Golden vectors for src/numerics, computed in exact rational arithmetic from the definitions of the formats.

Nothing here is taken from the C code and no table is typed in: a format is its number of exponent and
mantissa bits, its bias and what its all-ones exponent means; a rounding is a choice between two neighbors by
exact distance; an fp32 operation is a rational operation followed by one rounding. Exponentials, logarithms
and roots are Decimals of 60 digits. Only the standard library is used, and no libm function touches a vector,
so every machine writes the same bytes.

    generate.py DIRECTORY           writes the vector files
    generate.py --check DIRECTORY   compares them with fresh ones; exit status 1 if they differ

Fields are separated by spaces. Bits and codes are hexadecimal, real numbers are C hexadecimal floats.
"""
import decimal
import random
import sys
import tempfile
from decimal import Decimal
from fractions import Fraction as Q
from pathlib import Path

decimal.getcontext().prec = 60
decimal.getcontext().Emin = decimal.MIN_EMIN
decimal.getcontext().Emax = decimal.MAX_EMAX

NAN, INF = "nan", "inf"


class Format:
    """A binary floating-point format. specials: "ieee", "nan" (only the all-ones code is NaN) or "none"."""

    def __init__(self, exponent_bits, mantissa_bits, bias, specials):
        self.exponent_bits, self.mantissa_bits, self.bias = exponent_bits, mantissa_bits, bias
        self.specials = specials
        self.sign_shift = exponent_bits + mantissa_bits
        self.magnitudes = 1 << self.sign_shift
        top = {"ieee": ((1 << exponent_bits) - 1 << mantissa_bits) - 1, "nan": self.magnitudes - 2,
               "none": self.magnitudes - 1}[specials]
        self.top = top  # the magnitude code of the largest finite value

    def magnitude(self, code):
        """The value of a code without its sign."""
        code &= self.magnitudes - 1
        if code > self.top:
            infinity = self.specials == "ieee" and code == self.top + 1
            return INF if infinity else NAN
        exponent, mantissa = code >> self.mantissa_bits, code & (1 << self.mantissa_bits) - 1
        if exponent == 0:
            return mantissa * Q(2) ** (1 - self.bias - self.mantissa_bits)
        return ((1 << self.mantissa_bits) + mantissa) * Q(2) ** (exponent - self.bias - self.mantissa_bits)

    def nearest(self, x):
        """The magnitude code nearest to x >= 0, ties to the even code; past the top: top + 1.

        x is counted in steps of its own binade (subnormals share the lowest), whose codes are consecutive.
        """
        if x == 0:
            return 0
        log2 = x.numerator.bit_length() - x.denominator.bit_length()
        log2 -= x < Q(2) ** log2
        lowest = 1 - self.bias
        binade = max(log2, lowest)
        steps = x / Q(2) ** (binade - self.mantissa_bits)
        whole = int(steps)
        rest = steps - whole
        whole += rest > Q(1, 2) or (rest == Q(1, 2) and whole % 2 == 1)
        return min(whole + (binade - lowest << self.mantissa_bits), self.top + 1)

    def saturate(self, x):
        return min(self.nearest(x), self.top)


E2M1 = Format(2, 1, 1, "none")
E4M3 = Format(4, 3, 7, "nan")
BF16 = Format(8, 7, 127, "ieee")
F32 = Format(8, 23, 127, "ieee")
E2M1_MAX, E4M3_MAX = E2M1.magnitude(E2M1.top), E4M3.magnitude(E4M3.top)
E4M3_MIN = E4M3.magnitude(1)
NVFP4_MAX = E2M1_MAX * E4M3_MAX  # 2688
F32_SIGN, F32_INF, F32_NAN, F32_TOP = 1 << 31, F32.top + 1, 0x7FC00000, F32.top


def f32(x):
    """One fp32 rounding of a non-negative rational; infinity if it overflows."""
    code = F32.nearest(x)
    return INF if code > F32.top else F32.magnitude(code)


def f32_bits(x):
    return F32.nearest(abs(x)) | (F32_SIGN if x < 0 else 0)


def f32_value(bits):
    """The signed rational of finite bits."""
    magnitude = F32.magnitude(bits)
    return -magnitude if bits & F32_SIGN else magnitude


def real(x):
    """A Decimal as the nearest double, written so that C reads it back exactly."""
    return float(x).hex()


def dec(x):
    return Decimal(x.numerator) / Decimal(x.denominator)


def check_rounding(fmt):
    """nearest() against the bare definition: the closer of two neighbors, the even one at equal distance."""
    for code in range(fmt.top):
        below, above = fmt.magnitude(code), fmt.magnitude(code + 1)
        for weight in (Q(0), Q(1, 3), Q(1, 2), Q(2, 3)):
            expected = code if weight < Q(1, 2) or (weight == Q(1, 2) and code % 2 == 0) else code + 1
            assert fmt.nearest(below + weight * (above - below)) == expected


# ---- codes, roundings, products -------------------------------------------------------------------


def codes():
    """format code f32: every code of E2M1, E4M3 and E8M0 and the fp32 bits of its value."""
    for name, fmt in (("e2m1", E2M1), ("e4m3", E4M3)):
        check_rounding(fmt)
        for code in range(2 * fmt.magnitudes):
            value = fmt.magnitude(code)
            bits = F32_NAN if value == NAN else F32.nearest(value)
            yield f"{name} {code:x} {bits | (code >> fmt.sign_shift) << 31:x}"
    for code in range(256):
        yield f"e8m0 {code:x} {F32_NAN if code == 255 else F32.nearest(Q(2) ** (code - 127)):x}"


def around(bits):
    return [bits - 1, bits, bits + 1]


def roundings():
    """format f32 code: conversions at every midpoint and code value with neighbors, and at every edge."""
    edges = [0, 1, 2, 0x007FFFFF, 0x00800000, 0x3F800000, F32_TOP - 1, F32_TOP, F32_INF]
    for name, fmt in (("e2m1", E2M1), ("e4m3", E4M3)):
        inputs = set(edges)
        for code in range(fmt.top + 1):
            neighbor = code + 1 if code < fmt.top else code - 1  # above the top: as far away as below it
            half_step = abs(fmt.magnitude(neighbor) - fmt.magnitude(code)) / 2
            inputs.update(around(f32_bits(fmt.magnitude(code) + half_step)))
            if code:
                inputs.update(around(f32_bits(fmt.magnitude(code))))
        for bits in sorted(inputs):
            code = fmt.top if bits == F32_INF else fmt.saturate(F32.magnitude(bits))
            yield f"{name} {bits:x} {code:x}"
            yield f"{name} {bits | F32_SIGN:x} {code | fmt.magnitudes:x}"
    inputs = set(edges)
    chance = random.Random(16)
    for exponent in range(255):
        for mantissa in (0, 1, chance.randrange(2, 126), 126, 127):
            code = exponent << 7 | mantissa
            inputs.update(around(code << 16 | 0x8000))
    for position, bits in enumerate(sorted(inputs)):
        code = BF16.top + 1 if bits == F32_INF else BF16.nearest(F32.magnitude(bits))
        sign = position % 2
        yield f"bf16 {bits | sign << 31:x} {code | sign << 15:x}"


def products():
    """e4m3 then 16 x bf16: for each finite scale, its products with the 16 E2M1 codes; all exact in BF16."""
    for scale in range(256):
        if E4M3.magnitude(scale) == NAN:
            continue
        row = []
        for code in range(16):
            product = E4M3.magnitude(scale) * E2M1.magnitude(code)
            bits = BF16.nearest(product)
            assert BF16.magnitude(bits) == product, (scale, code)
            row.append(f"{bits | (scale >> 7 ^ code >> 3) << 15:x}")
        yield f"{scale:x} " + " ".join(row)


def mxfp4():
    """e8m0 then 16 x f32: code times power of two, rounded once to fp32."""
    for scale in range(255):
        row = []
        for code in range(16):
            value = f32(E2M1.magnitude(code) * Q(2) ** (scale - 127))
            bits = F32_INF if value == INF else F32.nearest(value)
            row.append(f"{bits | (code >> 3) << 31:x}")
        yield f"{scale:x} " + " ".join(row)


# ---- nvfp4 blocks ---------------------------------------------------------------------------------


def is_finite(bits):
    return bits & ~F32_SIGN <= F32_TOP


def target_of(amax, g):
    """(amax / 6) / g, two roundings."""
    sixth = f32(amax / 6)
    return f32(sixth / g)


def scale_of(target):
    return E4M3.top if target == INF else E4M3.nearest(min(max(target, E4M3_MIN), E4M3_MAX))


def quotient_code(magnitude, step):
    """e2m1(x / step) with the division rounded to fp32 first."""
    if step == 0:
        return E2M1.top if magnitude else 0
    quotient = f32(magnitude / step)
    return E2M1.top if quotient == INF else E2M1.saturate(quotient)


def quantize(values, g_bits):
    """16 fp32 bit patterns under global scale g -> (scale byte, codes, saturated, nonfinite)."""
    g = F32.magnitude(g_bits)
    if not all(is_finite(v) for v in values):
        return 0x7F, [0] * 16, 0, 1
    magnitudes = [F32.magnitude(v) for v in values]
    amax = max(magnitudes)
    excess = amax / (NVFP4_MAX * g)
    # Clipped by more than the roundings of the target can feign; no vector lies in between.
    assert not 1 + Q(1, 2**23) < excess < 1 + Q(1, 2**20)
    scale = scale_of(target_of(amax, g))
    step = f32(E4M3.magnitude(scale) * g)
    chosen = [quotient_code(m, step) | (v >> 31) << 3 for m, v in zip(magnitudes, values)]
    return scale, chosen, int(excess > 1 + Q(1, 2**21)), 0


def block_line(kind, values, g_bits):
    scale, chosen, saturated, nonfinite = quantize(values, g_bits)
    packed = "".join(f"{chosen[i] | chosen[i + 1] << 4:02x}" for i in range(0, 16, 2))
    inputs = " ".join(f"{v:x}" for v in values)
    return f"{kind} {g_bits:x} {inputs} {scale:x} {packed} {saturated} {nonfinite}"


def bell(chance):
    """A rational of roughly normal distribution, unit spread: the centered sum of 12 uniform numbers."""
    return Q(sum(chance.getrandbits(20) for _ in range(12)), 1 << 20) - 6


def sample(chance, spread, to_bf16):
    value = bell(chance) * spread
    if to_bf16:
        return BF16.nearest(abs(value)) << 16 | (F32_SIGN if value < 0 else 0)
    return f32_bits(value)


def mantissa_of(chance, shift):
    """A random fp32 number between 2^23 and 2^24, times 2^-shift."""
    return Q(chance.randrange(1 << 23, 1 << 24), 1 << shift)


def random_blocks(chance):
    """Both activation sources (BF16 input, fp32 intermediate), four spreads, many global scales, outliers."""
    for trial in range(96):
        spread = (Q(1, 50), Q(1), Q(37, 10), Q(900))[trial % 4]
        values = [sample(chance, spread, trial % 3 != 0) for _ in range(16)]
        if trial % 5 == 0:
            values[chance.randrange(16)] = sample(chance, spread * 60, True)
        g = spread * Q(chance.randrange(1, 4000), 1 << 20) if trial % 2 else mantissa_of(chance, 30)
        yield "random", values, f32_bits(g)


def scale_boundaries(chance):
    """The largest value puts (amax / 6) / g on a midpoint between two scales, or one ulp beside it."""
    for code in range(1, E4M3.top, 3):
        g = mantissa_of(chance, 31)
        middle = (E4M3.magnitude(code) + E4M3.magnitude(code + 1)) / 2
        center = f32_bits(6 * middle * g)
        for amax in around(center):
            values = [sample(chance, F32.magnitude(amax) / 8, False) for _ in range(16)]
            values = [v if F32.magnitude(v) < F32.magnitude(amax) else amax for v in values]
            values[chance.randrange(16)] = amax | chance.getrandbits(1) << 31
            yield "boundary", values, f32_bits(g)


def code_ties(chance):
    """Every midpoint of E2M1 and its neighbors, under a scale that the largest value (6 steps) fixes."""
    middles = [(E2M1.magnitude(c) + E2M1.magnitude(c + 1)) / 2 for c in range(7)]
    for scale in (0x01, 0x07, 0x08, 0x0F, 0x38, 0x55, 0x7D, 0x7E):
        for g in (Q(1), Q(3, 4), Q(1, 1 << 20)):
            step = E4M3.magnitude(scale) * g
            for shift in (-1, 0, 1):
                values = [f32_bits(m * step) + shift for m in middles]
                values += [v | F32_SIGN for v in values] + [f32_bits(6 * step), 0]
                chance.shuffle(values)
                yield "tie", values, f32_bits(g)


def reciprocal_witness():
    """A multiplication by 1 / scale would give 1.5 where the division gives exactly 1.25, a tie, hence 1."""
    step = E4M3.magnitude(0x0F)
    value, largest = f32_bits(Q("0.03662109375")), f32_bits(6 * step)
    assert F32.magnitude(value) / step == Q(5, 4)
    yield "witness", [value, largest] + [value | F32_SIGN, 0] * 7, f32_bits(Q(1))


def order_witnesses(chance, wanted=12):
    """Blocks on which a shortcut gives other bits: each is a mistake that a fast kernel invites."""
    shortcuts = {
        "amax/(6g)": lambda amax, g: scale_of(f32(amax / f32(6 * g))),
        "amax*(1/6)/g": lambda amax, g: scale_of(f32(f32(amax * f32(Q(1, 6))) / g)),
        "(amax/6)*(1/g)": lambda amax, g: scale_of(f32(f32(amax / 6) * f32(1 / g))),
    }
    for name, shortcut in shortcuts.items():
        found = 0
        while found < wanted:
            g = mantissa_of(chance, 31)
            code = chance.randrange(8, E4M3.top)
            middle = (E4M3.magnitude(code) + E4M3.magnitude(code + 1)) / 2
            amax = F32.magnitude(f32_bits(6 * middle * g) + chance.randrange(-1, 2))
            if shortcut(amax, g) == scale_of(target_of(amax, g)):
                continue
            found += 1
            values = [sample(chance, amax / 8, False) for _ in range(15)]
            values = [v if F32.magnitude(v) < amax else 0 for v in values] + [f32_bits(amax)]
            yield f"order:{name}", values, f32_bits(g)
    found = 0
    while found < wanted:
        g, scale = mantissa_of(chance, 28), chance.randrange(1, E4M3.top)
        step = f32(E4M3.magnitude(scale) * g)
        tie = (E2M1.magnitude(code := chance.randrange(7)) + E2M1.magnitude(code + 1)) / 2
        value = f32_bits(tie * step) + chance.randrange(-1, 2)
        exact = quotient_code(F32.magnitude(value), step)
        if E2M1.saturate(f32(F32.magnitude(value) * f32(1 / step))) == exact:
            continue
        largest = f32_bits(6 * step)
        if scale_of(target_of(F32.magnitude(largest), g)) != scale:
            continue
        found += 1
        yield "order:x*(1/step)", [largest, value] * 8, f32_bits(g)


def edge_blocks():
    """Zero, tiny and huge blocks; infinities and NaNs at every position class; extreme global scales."""
    one, fill = f32_bits(Q(1)), [f32_bits(Q(k, 7)) | (k % 2) << 31 for k in range(16)]
    yield "zero", [0] * 16, one
    yield "zero", [F32_SIGN * (k % 2) for k in range(16)], f32_bits(Q(1, 300))
    for largest in ("0.001", "0.006", "0.0029296875", "0.005859375", "2688", "2689", "3000", "1e9"):
        values = [f32_bits(Q(largest) * Q(k - 8, 9)) for k in range(15)] + [f32_bits(Q(largest))]
        yield "edge", values, one
    for special in (F32_INF, F32_INF | F32_SIGN, F32_NAN, F32_NAN | F32_SIGN, 0x7F800001):
        for position in (0, 7, 15):
            yield "nonfinite", fill[:position] + [special] + fill[position + 1:], one
    yield "nonfinite", [F32_NAN] * 16, one
    yield "edge", [F32_TOP] + fill[1:], one  # far above 2688
    yield "edge", [F32_TOP] * 15 + [F32_TOP | F32_SIGN], f32_bits(Q(2) ** 120)
    yield "edge", fill, f32_bits(Q(2) ** -126)  # the target overflows: clipped
    yield "edge", [1, 2, 3, 0x007FFFFF, 0x00800000, 4, 5, 6] * 2, f32_bits(Q(2) ** -126)
    yield "edge", [1, 2, 3, 0x007FFFFF, 0x00800000, 4, 5, 6] * 2, one  # subnormals under g = 1 vanish


def blocks():
    """kind g 16 x value scale codes saturated nonfinite; codes as bytes, even element in the low nibble."""
    chance = random.Random(4)
    groups = (random_blocks(chance), scale_boundaries(chance), code_ties(chance), reciprocal_witness(),
              order_witnesses(chance), edge_blocks())
    for group in groups:
        for kind, values, g in group:
            yield block_line(kind, values, g)


def globals_of_tokens():
    """amax g: the token's global scale amax / 2688; 1 where that quotient is zero in fp32."""
    chance = random.Random(2688)
    inputs = [0, 1, 2, 1344, 1345, 4000, 0x007FFFFF, 0x00800000, f32_bits(Q(6)), f32_bits(Q(2688)), F32_TOP]
    inputs += [chance.randrange(0x00800000, F32_TOP) for _ in range(64)]
    for bits in inputs:
        g = f32(F32.magnitude(bits) / NVFP4_MAX)
        yield f"{bits:x} {F32.nearest(g if g else Q(1)):x}"


# ---- real functions -------------------------------------------------------------------------------


def signed_f32(x):
    """One fp32 rounding of a signed rational that does not overflow."""
    return -f32(-x) if x < 0 else f32(x)


def exponential(d):
    """Infinity far beyond what a double holds, where the exact one would need d digits."""
    return Decimal(0) if d < -10**6 else Decimal("inf") if d > 10**6 else d.exp()


def sigmoid(z):
    return 1 / (1 + exponential(-dec(z)))


def swiglu_value(gate, up, alpha, beta, limit, relu2):
    """The definition, with the two inner fp32 roundings it prescribes: alpha * G and U + beta."""
    if relu2:
        return dec(max(up, Q(0))) ** 2
    g = min(gate, limit) if limit else gate
    u = min(max(up, -limit), limit) if limit else up
    return dec(g) * sigmoid(signed_f32(alpha * g)) * dec(signed_f32(u + beta))


def swiglu():
    """alpha beta limit relu2 gate up (f32 bits; limit 0: none), then h."""
    chance = random.Random(26)
    families = [(Q(1), Q(0), Q(0), 0), (Q(1), Q(0), Q(10), 0), (f32(Q("1.702")), Q(1), Q(7), 0),
                (f32(Q("1.702")), Q(1), Q(0), 0), (Q(1), Q(0), Q(0), 1), (Q(1), Q(0), Q(10), 1)]
    pairs = [(12, 3), (-12, 3), (3, 12), (3, -12), (-12, -12), (12, 12), (0, 5), (5, 0), (10, 10), (-10, -10),
             (-60, 1), (-88, 1), (-95, 2), (-103, 1), (-120, 1), (60, 1), (100, 1), (Q(1, 1000), Q(-1, 1000))]
    pairs += [(bell(chance) * 4, bell(chance) * 4) for _ in range(40)]
    for alpha, beta, limit, relu2 in families:
        for gate, up in pairs:
            gate, up = signed_f32(Q(gate)), signed_f32(Q(up))
            h = swiglu_value(gate, up, alpha, beta, limit, relu2)
            family = " ".join(f"{f32_bits(x):x}" for x in (alpha, beta, limit))
            yield f"{family} {relu2} {f32_bits(gate):x} {f32_bits(up):x} {real(h)}"


def scores():
    """logit (f32 bits), then sqrtsoftplus, sigmoid, and exp(logit - 3)."""
    chance = random.Random(9)
    logits = [0, 1, -1, Q(1, 10**8), Q(-1, 10**8), 7, -7, 17, -17, 20, -20, 50, -50, 80, -80, -87, 88, -88]
    logits += [89, -95, 100, -100, -103, -104, -120, 1000, -1000, Q(3 * 10**38), Q(-3 * 10**38)]
    logits += [bell(chance) * 6 for _ in range(100)]
    for logit in logits:
        z = signed_f32(Q(logit))
        d = dec(z)
        softplus = max(d, Decimal(0)) + (1 + (-abs(d)).exp()).ln()
        if d < -60:  # ln(1 + e) loses e's digits there; its series does not
            e = d.exp()
            softplus = e - e * e / 2
        yield f"{f32_bits(z):x} {real(softplus.sqrt())} {real(sigmoid(z))} {real(exponential(d - 3))}"


FILES = {"codes.txt": codes, "roundings.txt": roundings, "products.txt": products, "mxfp4.txt": mxfp4,
         "blocks.txt": blocks, "globals.txt": globals_of_tokens, "swiglu.txt": swiglu, "scores.txt": scores}


def write(directory):
    for name, lines in FILES.items():
        header = f"# {lines.__doc__}\n# Written by generate.py; do not edit.\n"
        (directory / name).write_text(header + "".join(line + "\n" for line in lines()), encoding="ascii")


def check(directory):
    with tempfile.TemporaryDirectory() as fresh:
        write(Path(fresh))
        bad = [n for n in FILES if not (directory / n).exists()
               or (directory / n).read_bytes() != (Path(fresh) / n).read_bytes()]
    for name in bad:
        print(f"{name} differs from what generate.py writes", file=sys.stderr)
    return 1 if bad else 0


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--check":
        return check(Path(sys.argv[2]))
    if len(sys.argv) == 2:
        write(Path(sys.argv[1]))
        return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
