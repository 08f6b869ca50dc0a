// The arithmetic of every op, once: plain C++ on single values, without branches, so that loops over it vectorise.
//
//   integers   y = clamp(rne(q) + zero_point, qmin, qmax)
//   floats     y = round to the format(q [+ zero_point])
//
// with the quotient q = RN_P(x / scale) by IEEE division ("onnx"), or one of the two forms over the reciprocal that
// other runtimes compute. Compile without FMA contraction and without any fast-math option. The float32 forms here are
// for the fast kernels; `exact` holds the ones in double for everything else.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/formats.h"

namespace linquant {

LQ_INLINE uint32_t bits_of(float v) {
  uint32_t u;
  memcpy(&u, &v, sizeof u);
  return u;
}

LQ_INLINE float float_of(uint32_t u) {
  float v;
  memcpy(&v, &u, sizeof v);
  return v;
}

LQ_INLINE uint64_t bits_of(double v) {
  uint64_t u;
  memcpy(&u, &v, sizeof u);
  return u;
}

LQ_INLINE double double_of(uint64_t u) {
  double v;
  memcpy(&v, &u, sizeof v);
  return v;
}

// --- float32 <-> narrower floats -------------------------------------------------------------------------------------

// The float32 whose last place is that of `format` for a magnitude `a`: adding it to `a` rounds `a` to the format, to
// nearest and ties to even, subnormals included. Needs a <= 2^100.
LQ_INLINE uint32_t rounder_bits(float a, int mantissa, int exponent) {
  const uint32_t e = bits_of(a) & 0x7f800000u;
  const uint32_t smallest = static_cast<uint32_t>(exponent) << 23;
  return (e > smallest ? e : smallest) + (static_cast<uint32_t>(23 - mantissa) << 23);
}

// The code of v. Overflow, NaN and the sign of zero are the format's (FloatFormat).
LQ_INLINE uint32_t encode_float(float v, const FloatFormat& f) {
  const uint32_t u = bits_of(v);
  float a = float_of(u & 0x7fffffffu);
  a = a > 131072.0f ? 131072.0f : a;  // above every format's overflow; NaN stays
  const uint32_t r = rounder_bits(a, f.mantissa, f.exponent);
  // a + rounder = rounder + (a in units of its last place), so the difference of the bits is that count; each octave
  // above the subnormals adds 2^mantissa codes.
  const uint32_t octaves = (((r >> 23) - static_cast<uint32_t>(23 - f.mantissa)) - static_cast<uint32_t>(f.exponent))
                           << f.mantissa;
  uint32_t code = (bits_of(a + float_of(r)) - r) + octaves;
  code = code > f.overflow ? f.overflow : code;
  uint32_t sign = (u >> 31) != 0 ? f.sign : 0;
  sign = (f.negative_zero | (code != 0)) ? sign : 0;
  const uint32_t nan = f.nan | (f.signed_nan ? sign : 0);
  return v != v ? nan : (code | sign);
}

// The value of a code; bits above the sign bit are ignored. No subnormal arithmetic, so right under any FTZ/DAZ mode.
LQ_INLINE float decode_float(uint32_t code, const FloatFormat& f) {
  const uint32_t magnitude = code & (f.sign - 1);
  const uint32_t sign = (code & f.sign) != 0 ? 0x80000000u : 0;
  const uint32_t one = static_cast<uint32_t>(f.exponent) << 23;
  const uint32_t shifted = magnitude << (23 - f.mantissa);
  const float subnormal = float_of(one | shifted) - float_of(one);
  const float normal = float_of(shifted + one - 0x800000u);
  uint32_t u = bits_of((magnitude >> f.mantissa) == 0 ? subnormal : normal);
  u = magnitude == f.inf ? 0x7f800000u : u;
  u = (magnitude > f.max && magnitude != f.inf) ? 0x7fc00000u : u;
  u |= sign;
  u = (!f.negative_zero && magnitude == 0 && sign != 0) ? 0x7fc00000u : u;
  return float_of(u);
}

LQ_INLINE float load_f16(uint16_t h) { return decode_float(h, kF16); }
LQ_INLINE uint16_t store_f16(float v) { return static_cast<uint16_t>(encode_float(v, kF16)); }

LQ_INLINE float load_bf16(uint16_t h) { return float_of(static_cast<uint32_t>(h) << 16); }
LQ_INLINE uint32_t round_bf16_bits(float v) {
  const uint32_t u = bits_of(v);
  const uint32_t r = u + 0x7fffu + ((u >> 16) & 1u);
  return v != v ? (u | 0x400000u) : r;
}
LQ_INLINE uint16_t store_bf16(float v) { return static_cast<uint16_t>(round_bf16_bits(v) >> 16); }

// e8m0: the byte b is 2^(b - 127), 0xff is NaN. 2^-127 is a subnormal float32.
LQ_INLINE float load_e8m0(uint8_t b) {
  const uint32_t u = b == 0 ? 0x400000u : static_cast<uint32_t>(b) << 23;
  return float_of(b == 0xff ? 0x7fc00000u : u);
}

// RN_P for a float32 quotient that will become a code. The float16 form leaves 65536 and more finite, which a clamp to
// bounds within [-65536, 65536] and every float code treat as they treat infinity.
inline constexpr int64_t kF16Overflow = 65536;
LQ_INLINE float round_quotient_f16(float q) {
  const uint32_t u = bits_of(q);
  float a = float_of(u & 0x7fffffffu);
  a = a > 131072.0f ? 131072.0f : a;
  const float r = float_of(rounder_bits(a, kF16.mantissa, kF16.exponent));
  return float_of(bits_of((a + r) - r) | (u & 0x80000000u));
}
LQ_INLINE float round_quotient_bf16(float q) { return float_of(round_bf16_bits(q) & 0xffff0000u); }

// --- integer codes in float32 ----------------------------------------------------------------------------------------

// Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits.
inline constexpr float kMagic = 12582912.0f;
inline constexpr int32_t kMagicBits = 0x4b400000;
// Where |zero_point| is at most this, the range seen from q, [qmin - zp, qmax - zp], fits the magic addition for codes
// of at most 16 bits.
inline constexpr int64_t kMaxFastZeroPoint = (int64_t{1} << 22) - 65536;

// NaN goes to lo: the comparisons, in this order, are also the minimum and maximum instructions of every machine.
LQ_INLINE float clamp(float q, float lo, float hi) {
  q = q > lo ? q : lo;
  return q < hi ? q : hi;
}

// clamp(rne(q) + zp, qmin, qmax) for lo = qmin - zp, hi = qmax - zp, bias = zp - kMagicBits.
LQ_INLINE int32_t encode_integer(float q, float lo, float hi, int32_t bias) {
  return static_cast<int32_t>(bits_of(clamp(q, lo, hi) + kMagic)) + bias;
}

// The same before the zero point is added, as a float, never -0.
LQ_INLINE float round_clamped(float q, float lo, float hi) { return (clamp(q, lo, hi) + kMagic) - kMagic; }

// x / scale for integer codes, correctly rounded, without a division: one product with the rounded reciprocal z = 1 /
// scale, corrected by the residual. x is clamped first, to lo * scale and hi * scale, so that nothing overflows and
// infinities and NaN are gone; the quotient then needs no clamp. The product is within 1.5 units in the last place, the
// residual is exact (or off by half a unit in its 25th bit), and its correction errs by less than any quotient's
// distance to a rounding boundary, since no quotient is a midpoint. Quotients below 2^-17 may be off in their last
// bits, and round to 0 all the same. Holds where `divides_by_product`.
LQ_INLINE float quotient_by_product(float x, float scale, float z, float lo_scaled, float hi_scaled) {
  const float a = clamp(x, lo_scaled, hi_scaled);
  const float q = a * z;
  return __builtin_fmaf(__builtin_fmaf(-q, scale, a), z, q);
}
LQ_INLINE bool divides_by_product(float scale) {
  return scale >= 8.0779357e-28f && scale <= 1.2379400e+27f;  // within [2^-90, 2^90]; false for NaN
}
inline constexpr int64_t kMaxProductZeroPoint = int64_t{1} << 20;

// --- everything else, in double --------------------------------------------------------------------------------------

namespace exact {

inline constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52

// double to float with the last bit sticky (round to odd): a later rounding to at most 22 bits is then the rounding of
// v.
LQ_INLINE float to_odd(double v) {
  const float f = static_cast<float>(v);
  const double back = f;
  const uint32_t u = bits_of(f);
  if (back == v || v != v || (u & 1u)) return f;
  // f is even and v lies beside it: the neighbour on v's side is odd. Zero steps to the smallest number of v's sign,
  // infinity to the largest.
  return float_of((v < 0 ? -v : v) > (back < 0 ? -back : back) ? u + 1 : u - 1);
}

// q rounded to P, where q is already a float32 value unless `wide`.
LQ_INLINE double round_quotient(double q, DataType precision, bool wide) {
  switch (precision) {
    case DataType::kFloat64:
      return q;
    case DataType::kFloat16: {
      const double r = round_quotient_f16(wide ? to_odd(q) : static_cast<float>(q));
      return r >= kF16Overflow ? HUGE_VAL : (r <= -kF16Overflow ? -HUGE_VAL : r);
    }
    case DataType::kBFloat16:
      return round_quotient_bf16(wide ? to_odd(q) : static_cast<float>(q));
    default:
      return static_cast<float>(q);
  }
}

// clamp(rne(q) + zp, lo, hi) for any q and any zero point.
LQ_INLINE int64_t encode_integer(double q, int64_t zero_point, int64_t lo, int64_t hi) {
  constexpr int64_t kPlain = int64_t{1} << 50;
  if (zero_point <= kPlain && zero_point >= -kPlain) {
    const double l = static_cast<double>(lo - zero_point), h = static_cast<double>(hi - zero_point);
    q = q > l ? q : l;
    q = q < h ? q : h;
    return static_cast<int64_t>((q + kMagic) - kMagic) + zero_point;
  }
  constexpr double kHuge = 36893488147419103232.0;  // 2^65: beyond what any int64 zero point can bring back
  if (q != q) return lo;
  q = q > kHuge ? kHuge : (q < -kHuge ? -kHuge : q);
  constexpr double kInteger = 4503599627370496.0;  // 2^52: from here on every double is an integer
  const double r =
      q >= kInteger || q <= -kInteger ? q : (q < 0 ? (q - kInteger) + kInteger : (q + kInteger) - kInteger);
  const __int128 y = static_cast<__int128>(r) + zero_point;
  return y < lo ? lo : (y > hi ? hi : static_cast<int64_t>(y));
}

// x - zero_point, exact, then rounded to float32 or kept in double.
LQ_INLINE double difference(int64_t x, int64_t zero_point, bool wide) {
  const __int128 d = static_cast<__int128>(x) - zero_point;
  return wide ? static_cast<double>(d) : static_cast<double>(static_cast<float>(d));
}

}  // namespace exact
}  // namespace linquant
