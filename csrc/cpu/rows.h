// Row kernels: what runs over the elements of a contiguous row, for every op. Interface only; rows.inc holds the code,
// compiled once for each instruction set by rows_base.cpp, rows_avx2.cpp and rows_avx512.cpp.
//
// A kernel knows nothing of granularity. It sees n elements and constants folded from scale and zero point, and steps
// through the constants in one of four ways.
#pragma once

#include <cstdint>

#include "core/arithmetic.h"
#include "core/formats.h"
#include "core/sum.h"

namespace linquant::cpu {

// How a row moves through the folded constants.
enum Step {
  kBlock,    // one set of constants for each `block` elements; the whole row where block >= n
  kElement,  // a set for each element
  kBlock16,  // one for each 16 elements
  kBlock32,  // one for each 32
  kSteps
};

// Elements in a tile. Readable up to the next whole tile in each folded array, whatever the row's length.
inline constexpr int64_t kTile = 64;

// Constants, one array a quantity. Which ones a kernel reads is said at its table.
struct Folded {
  const float* scale;       // divisor; the reciprocal where the quotient is a product
  const float* multiplier;  // the scale itself
  const float* lo;          // clamp bounds of the quotient; of x where the product is corrected
  const float* hi;
  const float* offset;  // added to the quotient (onednn, float4), or to the code's value (dequantize float4)
  const int32_t* bias;  // zero_point - kMagicBits; plain zero_point in dequantize

  Folded at(int64_t i) const { return {scale + i, multiplier + i, lo + i, hi + i, offset + i, bias + i}; }
};

struct Row {
  const void* x;
  void* y;
  int64_t n;
  int64_t block;
  Folded folded;
  const FloatFormat* format;  // of float codes
  uint32_t mask, flip;        // of integer codes read: value = ((code & mask) ^ flip) - flip
};

// Gradients of n elements, one set of constants each. All arrays are float32.
struct Gradient {
  const float* x;
  const float* g;       // of the result
  float *dx, *ds, *dz;  // of x; what is summed into scale's and zero_point's
  int64_t n;
  Folded folded;
  const FloatFormat* format;  // of float codes, saturating
  float bound;                // the largest |quotient| that does not saturate, of float codes
  bool identity;              // pass what saturates
};

using RowKernel = void (*)(const Row&);
using GradientKernel = void (*)(const Gradient&);

// What kernels for ranges do with numbers that are not finite.
enum Infinities { kKept, kLeftOut, kCounted, kInfinities };
using RangeKernel = void (*)(const void* x, int64_t n, float* lo, float* hi, int64_t* nonfinite);
// A value's bin is what `shift` leaves of its float32 pattern.
using HistogramKernel = void (*)(const void* x, int64_t n, int shift, void* counts, float* lo, float* hi);
inline constexpr int kCopies = 4;  // of a counter: one would wait for itself where equal values follow each other

enum Input { kF32, kF16, kBF16, kI32, kInputs };
// P = float32, float16, bfloat16 by division; float32 by a corrected product (kBlock only: elsewhere it gains nothing);
// the product with the reciprocal.
enum Quotient { kDivide, kDivideF16, kDivideBF16, kCorrected, kMultiply, kQuotients };
enum Codes { kInteger8, kInteger16, kInteger4, kInteger2, kFloat8, kFloat4, kCodes };  // 4 and 2 bits: packed

// A null entry: no fast kernel; the general engine (general.h) does it.
struct Kernels {
  // codes = encode(quotient). Integers read scale, lo, hi, bias (multiplier too for kCorrected, offset for kMultiply);
  // floats scale and offset.
  RowKernel quantize[kInputs][kQuotients][kCodes][kSteps];
  // The same, decoded again to x's type with `multiplier`. Integers take off offset for kMultiply; else there is
  // no zero point in the rounded quotient. Floats take off lo.
  RowKernel fake[kInputs][kQuotients][2][kSteps];  // integer, float
  // (code - zero point) * scale. Integers read scale, bias; floats scale, offset. Output types: the first three Inputs.
  RowKernel dequantize[kCodes][kBF16 + 1][kSteps];
  // Second index: of fake_quantize_linear, or of quantize_linear to float codes; third: integer, float.
  GradientKernel gradient[kQuotients][2][2];
  void (*widen[kInputs])(const void* x, float* y, int64_t n);
  void (*narrow[kBF16 + 1])(const float* x, void* y, int64_t n);
  float (*sum)(const float* t, int64_t n);            // sum_piece
  void (*add)(const float* t, float* to, int64_t n);  // to += t
  // Bytes to packed and back (mask, flip).
  RowKernel pack[2];  // 4 bits, 2 bits
  RowKernel unpack[2];
  // Takes n elements of x into a range: one range for all, or one for each. NaN never counts.
  RangeKernel reduce[kInputs][kInfinities];
  RangeKernel accumulate[kInputs][kInfinities];
  // One range and one histogram for all: uint32 counters, kCopies to a bin; int64 counters.
  HistogramKernel count_copies[kInputs], count[kInputs];
};

extern const Kernels kBaseKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace linquant::cpu
