// The two engines that the driver runs: fast kernels in float32 for what is common, exact scalar code in double for
// everything. Both give the same bits wherever both apply.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "core/arithmetic.h"
#include "cpu/driver.h"
#include "cpu/rows.h"
#include "plan.h"

namespace linquant::cpu {

// The kernels in force, or null where the exact engine was asked for everything.
const Kernels* active_kernels();

// Scale and zero point as the engines read them.
struct Parameters {
  const void* scale;
  DataType scale_type;
  const void* zero_point;  // null: absent
  DataType zero_point_type;
};

// Holds row-major copies where they are needed. A floating zero point is rounded to nearest and clamped to [lo, hi].
class ParameterTensors {
 public:
  ParameterTensors(const Tensor& scale, const std::optional<Tensor>& zero_point, int64_t lo, int64_t hi);
  Parameters get() const {
    return {scale_.const_data_ptr(), type_of(scale_), zero_point_ ? zero_point_->const_data_ptr() : nullptr,
            zero_point_ ? type_of(*zero_point_) : DataType::kNone};
  }
  int64_t count() const { return scale_.numel(); }

 private:
  Tensor scale_;
  std::optional<Tensor> zero_point_;
};

// Largest |zero point|; 0 when absent. Only wide types need reading.
int64_t largest_zero_point(const Parameters& p, int64_t count);

enum class Op { kQuantize, kFakeQuantize, kDequantize };

struct Spec {
  Op op;
  Parameters parameters;
  const CodeType* code;
  FloatFormat format;
  int64_t qmin, qmax;
  Arithmetic arithmetic;
  DataType x, y;  // of values; the codes' side is `code`
  DataType precision;
  DataType between;  // fake quantize: the type that the dequantized value is rounded to before x's
  bool wide;
  bool packed;
  bool floating;        // dequantize: x holds codes as numbers of type `x`
  uint32_t mask, flip;  // how a byte or word of integer codes is read
  Quotient quotient;
  int64_t largest_zero_point;  // by magnitude, or more
  const RowKernel* kernels;    // of the fast engine, by Step; null: the exact engine
  const RowKernel* corrected;  // the same by corrected products, for scales that allow it; or null
};

class FastEngine {
 public:
  static constexpr bool kAnyBlock = false;
  explicit FastEngine(const Spec& spec);
  void fold(const Runs& runs, const Walk& w);
  void row(const void* x, void* y, int64_t n, int64_t skip, const Walk& w) const;
  const Folded& folded() const { return folded_; }

 private:
  void fold_zero_points(const Runs& runs, int64_t count, bool present, bool corrected);

  const Spec& spec_;
  int64_t filled_ = 0;      // constants that do not depend on a zero point are filled in once
  bool corrected_ = false;  // the folded constants are for `corrected`
  Folded folded_;
  // Uninitialised on purpose: only what is folded is read, or lies in a tile's unused part.
  alignas(64) float scale_[kConstants + kTile],
      multiplier_[kConstants + kTile], lo_[kConstants + kTile], hi_[kConstants + kTile], offset_[kConstants + kTile];
  alignas(64) int32_t bias_[kConstants + kTile];
};

class ExactEngine {
 public:
  static constexpr bool kAnyBlock = true;
  explicit ExactEngine(const Spec& spec) : spec_(spec) {}
  void fold(const Runs& runs, const Walk& w);
  void row(const void* x, void* y, int64_t n, int64_t skip, const Walk& w) const;
  double scale(int64_t run) const { return scale_[run]; }
  int64_t zero_point(int64_t run) const { return zero_point_[run]; }
  double offset(int64_t run) const { return offset_[run]; }

 private:
  const Spec& spec_;
  double scale_[kConstants + 1];
  int64_t zero_point_[kConstants + 1];  // of integer codes
  double offset_[kConstants + 1];       // of float codes
};

// The spec of quantize_linear or fake_quantize_linear, its kernels chosen.
Spec quantize_spec(Op op, const QuantizeSpec& checked, const ParameterTensors& parameters, bool packed);

// Runs `spec` over the map with the fast kernels where there are some, else exactly.
void run_spec(const Spec& spec, const ScaleMap& map, const void* x, void* y, int x_bits, int y_bits);

// The spec of dequantize_linear.
Spec dequantize_spec(const DequantizeSpec& checked, const ParameterTensors& parameters);

// Element i as a number; int32 becomes float32 first.
double load_value(DataType type, const void* p, int64_t i);
// A number that the type holds, or that is rounded to it by way of float32.
void store_value(DataType type, void* p, int64_t i, double v);
// The code of element i; the bits of a float code.
int64_t load_code(const Spec& s, const void* p, int64_t i);
// x / scale as the arithmetic has it, and what is rounded to the code: the same, or with the zero point added.
struct Sum {
  double quotient, sum;
};
Sum form_quotient(const Spec& s, double x, double scale, int64_t zero_point, double offset);

// The op `unpack`.
Tensor unpack(const Tensor& x, int64_t x_dtype, std::optional<int64_t> packed_size);

inline int bits_of(DataType t) {
  switch (t) {
    case DataType::kFloat64:
    case DataType::kInt64:
      return 64;
    case DataType::kFloat32:
    case DataType::kInt32:
    case DataType::kUInt32:
      return 32;
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kInt16:
    case DataType::kUInt16:
      return 16;
    default:
      return 8;
  }
}

// Bits from one code to the next in memory.
inline int code_bits(const CodeType& code, bool packed) { return packed ? code.bits : std::max(code.bits, 8); }

}  // namespace linquant::cpu
