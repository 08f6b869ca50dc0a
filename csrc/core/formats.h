// What codes are: their numbers in ONNX, their widths and ranges, and the shape of the small float formats.
// No Torch here; everything serves host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LQ_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define LQ_INLINE inline __attribute__((always_inline))
#else
#define LQ_INLINE inline
#endif

namespace linquant {

// ONNX TensorProto.DataType numbers; the ops' arguments carry them.
enum class DataType : int {
  kNone = 0,
  kFloat32 = 1,
  kUInt8 = 2,
  kInt8 = 3,
  kUInt16 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kFloat16 = 10,
  kFloat64 = 11,
  kUInt32 = 12,
  kBFloat16 = 16,
  kFloat8E4M3FN = 17,
  kFloat8E4M3FNUZ = 18,
  kFloat8E5M2 = 19,
  kFloat8E5M2FNUZ = 20,
  kUInt4 = 21,
  kInt4 = 22,
  kFloat4E2M1 = 23,
  kFloat8E8M0 = 24,
  kUInt2 = 25,
  kInt2 = 26,
};

// A binary float format of at most 16 bits, as the conversions in arithmetic.h need it. A code is a magnitude (exponent
// and mantissa bits) with a sign bit above it.
struct FloatFormat {
  int32_t mantissa;    // explicit mantissa bits
  int32_t exponent;    // exponent of the smallest normal number, biased as in float32
  uint32_t sign;       // the sign bit
  uint32_t max;        // magnitude of the largest finite number
  uint32_t overflow;   // magnitude that stands for everything larger; the same as `max` when saturating
  uint32_t nan;        // magnitude of NaN
  uint32_t inf;        // magnitude of infinity, or one that no code has
  bool negative_zero;  // false (the fnuz formats): the sign bit alone is the one NaN
  bool signed_nan;     // NaN keeps the sign of what was encoded

  LQ_INLINE constexpr FloatFormat saturating(bool yes) const {
    FloatFormat f = *this;
    if (yes) f.overflow = f.max;
    return f;
  }
};

inline constexpr uint32_t kNoCode = 0xffffffffu;

//                                       m   e         sign    max     over    nan     inf      -0     signed nan
inline constexpr FloatFormat kE4M3FN = {3, 127 - 6, 0x80, 0x7e, 0x7f, 0x7f, kNoCode, true, true};
inline constexpr FloatFormat kE4M3FNUZ = {3, 127 - 7, 0x80, 0x7f, 0x80, 0x80, kNoCode, false, false};
inline constexpr FloatFormat kE5M2 = {2, 127 - 14, 0x80, 0x7b, 0x7c, 0x7f, 0x7c, true, true};
inline constexpr FloatFormat kE5M2FNUZ = {2, 127 - 15, 0x80, 0x7f, 0x80, 0x80, kNoCode, false, false};
inline constexpr FloatFormat kE2M1 = {1, 127 - 0, 0x8, 0x7, 0x7, 0x7, kNoCode, true, false};
inline constexpr FloatFormat kF16 = {10, 127 - 14, 0x8000, 0x7bff, 0x7c00, 0x7e00, 0x7c00, true, true};

// A type of quantized values. Integers have a range, floats a format.
struct CodeType {
  DataType type;
  const char* name;
  int bits;
  bool is_float;
  int64_t min, max;
  FloatFormat format;

  constexpr bool sub_byte() const { return bits < 8; }
  constexpr bool is_signed() const { return min < 0; }
};

inline constexpr CodeType kCodeTypes[] = {
    {DataType::kUInt8, "uint8", 8, false, 0, 255, {}},
    {DataType::kInt8, "int8", 8, false, -128, 127, {}},
    {DataType::kUInt16, "uint16", 16, false, 0, 65535, {}},
    {DataType::kInt16, "int16", 16, false, -32768, 32767, {}},
    {DataType::kInt32, "int32", 32, false, -2147483648LL, 2147483647LL, {}},
    {DataType::kFloat8E4M3FN, "float8_e4m3fn", 8, true, 0, 0, kE4M3FN},
    {DataType::kFloat8E4M3FNUZ, "float8_e4m3fnuz", 8, true, 0, 0, kE4M3FNUZ},
    {DataType::kFloat8E5M2, "float8_e5m2", 8, true, 0, 0, kE5M2},
    {DataType::kFloat8E5M2FNUZ, "float8_e5m2fnuz", 8, true, 0, 0, kE5M2FNUZ},
    {DataType::kUInt4, "uint4", 4, false, 0, 15, {}},
    {DataType::kInt4, "int4", 4, false, -8, 7, {}},
    {DataType::kFloat4E2M1, "float4_e2m1", 4, true, 0, 0, kE2M1},
    {DataType::kUInt2, "uint2", 2, false, 0, 3, {}},
    {DataType::kInt2, "int2", 2, false, -2, 1, {}},
};

// The row of the table for a number, or nullptr.
inline const CodeType* find_code_type(int64_t number) {
  for (const CodeType& t : kCodeTypes)
    if (static_cast<int64_t>(t.type) == number) return &t;
  return nullptr;
}

// How the quotient x / scale is formed: as ONNX, ExecuTorch or oneDNN do.
enum class Arithmetic { kOnnx, kExecuTorch, kOneDnn };

}  // namespace linquant
