#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

// Calls f with a function that loads element i of `p` as a number of its own type.
template <class F>
void with_scale(DataType type, const void* p, const F& f) {
  switch (type) {
    case DataType::kFloat16:
      return f([p](int64_t i) { return load_f16(static_cast<const uint16_t*>(p)[i]); });
    case DataType::kBFloat16:
      return f([p](int64_t i) { return load_bf16(static_cast<const uint16_t*>(p)[i]); });
    case DataType::kFloat64:
      return f([p](int64_t i) { return static_cast<const double*>(p)[i]; });
    case DataType::kFloat8E8M0:
      return f([p](int64_t i) { return load_e8m0(static_cast<const uint8_t*>(p)[i]); });
    default:
      return f([p](int64_t i) { return static_cast<const float*>(p)[i]; });
  }
}

template <class F>
void with_integer(DataType type, const void* p, const F& f) {
  switch (type) {
    case DataType::kInt8:
      return f([p](int64_t i) { return static_cast<const int8_t*>(p)[i]; });
    case DataType::kUInt16:
      return f([p](int64_t i) { return static_cast<const uint16_t*>(p)[i]; });
    case DataType::kInt16:
      return f([p](int64_t i) { return static_cast<const int16_t*>(p)[i]; });
    case DataType::kInt32:
      return f([p](int64_t i) { return static_cast<const int32_t*>(p)[i]; });
    case DataType::kUInt32:
      return f([p](int64_t i) { return static_cast<const uint32_t*>(p)[i]; });
    case DataType::kInt64:
      return f([p](int64_t i) { return static_cast<const int64_t*>(p)[i]; });
    default:
      return f([p](int64_t i) { return static_cast<const uint8_t*>(p)[i]; });
  }
}

// Calls f(j, number) for the scale numbers of the first `count` runs. The common stride is a loop of its own, which
// compilers vectorise.
template <class F>
LQ_INLINE void for_runs(const Runs& r, int64_t count, const F& f) {
  if (r.stride == 1) {
    for (int64_t j = 0; j < count; ++j) f(j, r.first + j);
  } else {
    for (int64_t j = 0; j < count; ++j) f(j, r.first + j * r.stride);
  }
}

// Only float4 codes have a zero point that counts.
bool float_zero_point(const Spec& s) { return s.code->bits == 4 && s.parameters.zero_point; }

// Spreads values of runs over their elements, in place and from the end: a[j] for j in [0, n) becomes the value of the
// run that element j is in, where the first run has lost `skip` elements.
template <class T>
void spread(T* a, int64_t block, int64_t skip, int64_t runs, int64_t n) {
  for (int64_t r = runs; r-- > 0;) {
    const T v = a[r];
    const int64_t begin = std::max<int64_t>(0, r * block - skip), end = std::min(n, (r + 1) * block - skip);
    std::fill(a + begin, a + end, v);
  }
}

template <class T>
void repeat(T* a, int64_t period, int64_t n) {
  for (int64_t i = period; i < n; i += period) std::copy(a, a + std::min(period, n - i), a + i);
}

}  // namespace

ParameterTensors::ParameterTensors(const Tensor& scale, const std::optional<Tensor>& zero_point, int64_t lo, int64_t hi)
    : scale_(row_major(scale)) {
  if (!zero_point) return;
  zero_point_ = row_major(*zero_point);
  const DataType type = type_of(*zero_point);
  if (!is_float(type)) return;
  const Tensor integers =
      Output::contiguous("", "", scale, sizes_of(*zero_point), DataType::kInt32, std::nullopt).tensor();
  auto* to = static_cast<int32_t*>(integers.mutable_data_ptr());
  with_scale(type, zero_point_->const_data_ptr(), [&](auto load) {
    for (int64_t i = 0; i < zero_point_->numel(); ++i)
      to[i] = static_cast<int32_t>(exact::encode_integer(load(i), 0, lo, hi));
  });
  zero_point_ = integers;
}

int64_t largest_zero_point(const Parameters& p, int64_t count) {
  if (!p.zero_point) return 0;
  switch (p.zero_point_type) {
    case DataType::kInt8:
      return 128;
    case DataType::kInt16:
      return 32768;
    case DataType::kUInt16:
      return 65535;
    default:
      if (bits_of(p.zero_point_type) == 8) return 255;
  }
  int64_t largest = 0;
  with_integer(p.zero_point_type, p.zero_point, [&](auto load) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t z = load(i);
      largest = std::max(largest, z < 0 ? (z == INT64_MIN ? INT64_MAX : -z) : z);
    }
  });
  return largest;
}

// --- fast ------------------------------------------------------------------------------------------------------------

FastEngine::FastEngine(const Spec& spec) : spec_(spec), folded_{scale_, multiplier_, lo_, hi_, offset_, bias_} {}

void FastEngine::fold(const Runs& r, const Walk& w) {
  const Spec& s = spec_;
  const Parameters& p = s.parameters;
  const bool periodic = w.period < w.n;
  // Elements that need constants of their own.
  const int64_t n = w.step != kElement ? r.count : periodic ? w.piece : std::min(w.piece, r.count * w.block - r.skip);
  const int64_t span = periodic ? w.period : n;
  const auto expand = [&](auto* a) {
    if (w.step != kElement) return;
    if (w.block > 1) spread(a, w.block, r.skip, r.count, span);
    if (periodic) repeat(a, span, n);
  };

  with_scale(p.scale_type, p.scale, [&](auto load) {
    for_runs(r, r.count, [&](int64_t j, int64_t i) { multiplier_[j] = static_cast<float>(load(i)); });
  });
  const bool correctable = s.corrected && w.step == kBlock;
  bool corrected = correctable;
  for (int64_t j = 0; corrected && j < r.count; ++j) corrected = divides_by_product(multiplier_[j]);
  if (corrected || (s.op != Op::kDequantize && s.arithmetic != Arithmetic::kOnnx)) {
    for (int64_t j = 0; j < r.count; ++j) scale_[j] = 1.0f / multiplier_[j];
  } else {
    std::copy(multiplier_, multiplier_ + r.count, scale_);
  }

  // What depends on the zero point alone can stay as it is when there is none.
  const bool zero_points = s.code->is_float ? float_zero_point(s) : p.zero_point != nullptr;
  const bool varies = zero_points || correctable;
  if (varies || filled_ < n) {
    fold_zero_points(r, varies ? r.count : n, zero_points, corrected);
    filled_ = varies ? 0 : n;
  }
  corrected_ = corrected;
  expand(scale_);
  if (s.op == Op::kFakeQuantize || corrected) expand(multiplier_);
  if (!varies) return;
  expand(lo_);
  expand(hi_);
  expand(offset_);
  expand(bias_);
}

void FastEngine::fold_zero_points(const Runs& r, int64_t count, bool present, bool corrected) {
  const Spec& s = spec_;
  const Parameters& p = s.parameters;
  if (!present) {
    std::fill(bias_, bias_ + count, 0);
  } else {
    with_integer(p.zero_point_type, p.zero_point, [&](auto load) {
      for_runs(r, count, [&](int64_t j, int64_t i) { bias_[j] = static_cast<int32_t>(load(i)); });
    });
  }
  if (s.code->is_float) {
    for (int64_t j = 0; j < count; ++j) {
      const float z = present ? decode_float(static_cast<uint32_t>(bias_[j]), kE2M1) : 0.0f;
      lo_[j] = z;
      // Adding -0 changes nothing, not even a zero's sign.
      offset_[j] = present || s.op == Op::kDequantize ? z : -0.0f;
    }
  } else if (s.op != Op::kDequantize) {
    const bool onednn = s.arithmetic == Arithmetic::kOneDnn;
    const float qmin = static_cast<float>(s.qmin), qmax = static_cast<float>(s.qmax);
    for (int64_t j = 0; j < count; ++j) offset_[j] = onednn ? static_cast<float>(bias_[j]) : 0.0f;
    for (int64_t j = 0; j < count; ++j) {
      const float z = onednn ? 0.0f : static_cast<float>(bias_[j]);
      lo_[j] = qmin - z;
      hi_[j] = qmax - z;
    }
    for (int64_t j = 0; j < count; ++j) bias_[j] = (onednn ? 0 : bias_[j]) - kMagicBits;
    if (corrected)
      for (int64_t j = 0; j < count; ++j) lo_[j] *= multiplier_[j], hi_[j] *= multiplier_[j];
  }
}

void FastEngine::row(const void* x, void* y, int64_t n, int64_t skip, const Walk& w) const {
  Row row{x, y, n, w.block, folded_, &spec_.format, spec_.mask, spec_.flip};
  const RowKernel kernel = (corrected_ ? spec_.corrected : spec_.kernels)[w.step];
  if (w.step == kBlock && skip > 0) {
    // The rest of a run that an earlier piece began.
    const int64_t rest = std::min(n, w.block - skip);
    row.n = rest;
    kernel(row);
    const int64_t x_bits = spec_.op == Op::kDequantize ? code_bits(*spec_.code, spec_.packed) : bits_of(spec_.x);
    const int64_t y_bits = spec_.op == Op::kQuantize ? code_bits(*spec_.code, spec_.packed) : bits_of(spec_.y);
    row.x = static_cast<const char*>(x) + rest * x_bits / 8;
    row.y = static_cast<char*>(y) + rest * y_bits / 8;
    row.n = n - rest;
    row.folded = folded_.at(1);
    if (row.n == 0) return;
  }
  kernel(row);
}

// --- exact -----------------------------------------------------------------------------------------------------------

double load_value(DataType type, const void* p, int64_t i) {
  switch (type) {
    case DataType::kFloat16:
      return load_f16(static_cast<const uint16_t*>(p)[i]);
    case DataType::kBFloat16:
      return load_bf16(static_cast<const uint16_t*>(p)[i]);
    case DataType::kFloat64:
      return static_cast<const double*>(p)[i];
    case DataType::kInt32:
      return static_cast<float>(static_cast<const int32_t*>(p)[i]);
    default:
      return static_cast<const float*>(p)[i];
  }
}

// A value that the type holds exactly (int32: truncated, as casting a tensor does).
void store_value(DataType type, void* p, int64_t i, double v) {
  switch (type) {
    case DataType::kFloat16:
      static_cast<uint16_t*>(p)[i] = store_f16(static_cast<float>(v));
      break;
    case DataType::kBFloat16:
      static_cast<uint16_t*>(p)[i] = store_bf16(static_cast<float>(v));
      break;
    case DataType::kFloat64:
      static_cast<double*>(p)[i] = v;
      break;
    case DataType::kInt32:
      // Out of range (and NaN) gives what x86's conversion gives, the smallest int32.
      static_cast<int32_t*>(p)[i] = v > -2147483649.0 && v < 2147483648.0 ? static_cast<int32_t>(v) : INT32_MIN;
      break;
    default:
      static_cast<float*>(p)[i] = static_cast<float>(v);
      break;
  }
}

int64_t load_code(const Spec& s, const void* p, int64_t i) {
  const int bits = s.code->bits;
  if (bits == 32) return static_cast<const int32_t*>(p)[i];
  uint32_t code;
  if (s.packed) {
    const int per_byte = 8 / bits;
    code = static_cast<uint32_t>(static_cast<const uint8_t*>(p)[i / per_byte]) >> (i % per_byte * bits);
  } else {
    code = bits == 16 ? static_cast<const uint16_t*>(p)[i] : static_cast<const uint8_t*>(p)[i];
  }
  if (s.code->is_float) return code;
  return static_cast<int64_t>((code & s.mask) ^ s.flip) - s.flip;
}

Sum form_quotient(const Spec& s, double x, double scale, int64_t zero_point, double offset) {
  if (s.arithmetic != Arithmetic::kOnnx) {
    const float product = static_cast<float>(x) * (1.0f / static_cast<float>(scale));
    const bool onednn = s.arithmetic == Arithmetic::kOneDnn;
    return {product, onednn ? product + static_cast<float>(zero_point) : product};
  }
  const double quotient = s.wide ? x / scale : static_cast<double>(static_cast<float>(x) / static_cast<float>(scale));
  const double q = exact::round_quotient(quotient, s.precision, s.wide);
  if (!s.code->is_float) return {q, q};
  const double sum = s.wide ? q + offset : static_cast<double>(static_cast<float>(q) + static_cast<float>(offset));
  return {q, exact::round_quotient(sum, s.precision, s.wide)};
}

namespace {

// v, which is a float32 value unless `wide`, in a narrower type.
double round_value(double v, DataType type, bool wide) {
  switch (type) {
    case DataType::kFloat64:
      return v;
    case DataType::kFloat16:
      return load_f16(store_f16(wide ? exact::to_odd(v) : static_cast<float>(v)));
    case DataType::kBFloat16:
      return load_bf16(store_bf16(wide ? exact::to_odd(v) : static_cast<float>(v)));
    default:
      return static_cast<float>(v);
  }
}

void store_code(const Spec& s, void* p, int64_t i, int64_t code) {
  const int bits = s.code->bits;
  if (s.packed) {
    const int per_byte = 8 / bits, shift = static_cast<int>(i % per_byte) * bits;
    uint8_t& byte = static_cast<uint8_t*>(p)[i / per_byte];
    byte = static_cast<uint8_t>((shift == 0 ? 0 : byte) | ((code & ((1 << bits) - 1)) << shift));
  } else if (bits == 32) {
    static_cast<int32_t*>(p)[i] = static_cast<int32_t>(code);
  } else if (bits == 16) {
    static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(code);
  } else {
    static_cast<uint8_t*>(p)[i] = static_cast<uint8_t>(code);
  }
}

int64_t encode(const Spec& s, double x, double scale, int64_t zero_point, double offset) {
  const double q = form_quotient(s, x, scale, zero_point, offset).sum;
  if (s.code->is_float) return encode_float(s.wide ? exact::to_odd(q) : static_cast<float>(q), s.format);
  return exact::encode_integer(q, s.arithmetic == Arithmetic::kOneDnn ? 0 : zero_point, s.qmin, s.qmax);
}

double scaled(double d, double scale, bool wide) {
  return wide ? d * scale : static_cast<double>(static_cast<float>(d) * static_cast<float>(scale));
}

// (code - zero point) * scale, in float32 unless the scale is float64.
double decode(const Spec& s, int64_t code, double scale, int64_t zero_point, double zero_value) {
  const bool wide = s.parameters.scale_type == DataType::kFloat64;
  double d;
  if (s.code->is_float) {
    d = decode_float(static_cast<uint32_t>(code), s.code->format);
    if (float_zero_point(s)) d -= zero_value;
  } else {
    d = exact::difference(code, zero_point, wide);
  }
  return scaled(d, scale, wide);
}

}  // namespace

void ExactEngine::fold(const Runs& r, const Walk&) {
  const Parameters& p = spec_.parameters;
  with_scale(p.scale_type, p.scale, [&](auto load) {
    for (int64_t j = 0; j < r.count; ++j) scale_[j] = load(r.first + j * r.stride);
  });
  for (int64_t j = 0; j < r.count; ++j) zero_point_[j] = 0, offset_[j] = -0.0;
  if (!p.zero_point || (spec_.code->is_float && !float_zero_point(spec_))) return;
  with_integer(p.zero_point_type, p.zero_point, [&](auto load) {
    for (int64_t j = 0; j < r.count; ++j) {
      zero_point_[j] = load(r.first + j * r.stride);
      if (spec_.code->is_float) offset_[j] = decode_float(static_cast<uint32_t>(zero_point_[j]), kE2M1);
    }
  });
}

void ExactEngine::row(const void* x, void* y, int64_t n, int64_t skip, const Walk& w) const {
  const Spec& s = spec_;
  const bool wide = s.parameters.scale_type == DataType::kFloat64;
  for (int64_t i = 0, run = 0, left = w.block - skip; i < n; ++i, --left) {
    if (left == 0) ++run, left = w.block;
    const double scale = scale_[run], offset = offset_[run];
    const int64_t zero_point = zero_point_[run];
    if (s.op == Op::kQuantize) {
      store_code(s, y, i, encode(s, load_value(s.x, x, i), scale, zero_point, offset));
    } else if (s.op == Op::kFakeQuantize) {
      const int64_t code = encode(s, load_value(s.x, x, i), scale, zero_point, offset);
      const double v = round_value(decode(s, code, scale, zero_point, offset), s.between, wide);
      // The cast to x's type is PyTorch's, which goes from double to the 16-bit types by way of float32.
      store_value(s.y, y, i, s.y == DataType::kFloat64 || s.y == DataType::kInt32 ? v : round_value(v, s.y, false));
    } else {
      const double v = s.floating
                           ? scaled(load_value(s.x, x, i) - (s.code->is_float ? offset + 0.0 : zero_point), scale, wide)
                           : decode(s, load_code(s, x, i), scale, zero_point, offset);
      store_value(s.y, y, i, round_value(v, s.y, wide));
    }
  }
}

namespace {

bool is_unsigned(DataType t) {
  return t == DataType::kUInt8 || t == DataType::kUInt16 || t == DataType::kUInt32 || t == DataType::kNone;
}

Quotient find_quotient(const QuantizeSpec& q) {
  if (q.arithmetic != Arithmetic::kOnnx) return kMultiply;
  if (q.precision == DataType::kFloat16) return kDivideF16;
  return q.precision == DataType::kBFloat16 ? kDivideBF16 : kDivide;
}

const RowKernel* find_kernels(Op op, const QuantizeSpec& q, bool packed, DataType between, Quotient quotient) {
  const Kernels* kernels = active_kernels();
  if (!kernels || q.wide || q.code->bits == 32) return nullptr;
  Input input;
  switch (q.x) {
    case DataType::kFloat32:
      input = kF32;
      break;
    case DataType::kFloat16:
      input = kF16;
      break;
    case DataType::kBFloat16:
      input = kBF16;
      break;
    case DataType::kInt32:
      input = kI32;
      break;
    default:
      return nullptr;
  }
  const RowKernel* found;
  if (op == Op::kFakeQuantize) {
    if (between != DataType::kFloat32 && between != q.x) return nullptr;
    found = kernels->fake[input][quotient][q.code->is_float ? 1 : 0];
  } else if (q.code->is_float) {
    found = kernels->quantize[input][quotient][packed ? kFloat4 : kFloat8];
  } else {
    const Codes codes = q.code->bits == 16  ? kInteger16
                        : !packed           ? kInteger8
                        : q.code->bits == 4 ? kInteger4
                                            : kInteger2;
    found = kernels->quantize[input][quotient][codes];
  }
  return found[kBlock] ? found : nullptr;
}

const RowKernel* find_dequantize_kernels(const Spec& s, int64_t largest) {
  const Kernels* kernels = active_kernels();
  if (!kernels || s.floating || s.code->bits == 32 || s.y == DataType::kFloat64 ||
      s.parameters.scale_type == DataType::kFloat64)
    return nullptr;
  // The difference of code and zero point is taken in int32.
  if (!s.code->is_float && largest > INT32_MAX - 65536) return nullptr;
  const Input output = s.y == DataType::kFloat16 ? kF16 : s.y == DataType::kBFloat16 ? kBF16 : kF32;
  Codes codes;
  if (s.code->is_float) {
    codes = s.packed ? kFloat4 : kFloat8;
  } else {
    codes = s.code->bits == 16 ? kInteger16 : !s.packed ? kInteger8 : s.code->bits == 4 ? kInteger4 : kInteger2;
  }
  return kernels->dequantize[codes][output];
}

}  // namespace

Spec quantize_spec(Op op, const QuantizeSpec& q, const ParameterTensors& parameters, bool packed) {
  Spec s{};
  s.op = op;
  s.parameters = parameters.get();
  s.code = q.code;
  s.format = q.format;
  s.qmin = q.qmin;
  s.qmax = q.qmax;
  s.arithmetic = q.arithmetic;
  s.x = s.y = q.x;
  s.precision = q.precision;
  s.between = q.scale == DataType::kFloat8E8M0 ? DataType::kFloat32 : q.scale;
  s.wide = q.wide && q.arithmetic == Arithmetic::kOnnx;
  s.packed = packed;
  const Quotient quotient = s.quotient = find_quotient(q);
  const int64_t zero_point = s.largest_zero_point =
      q.code->is_float ? 0 : largest_zero_point(s.parameters, parameters.count());
  const bool fits = quotient != kDivideF16 || q.code->is_float ||
                    (q.qmax + (is_unsigned(s.parameters.zero_point_type) ? 0 : zero_point) <= kF16Overflow &&
                     zero_point - q.qmin <= kF16Overflow);
  if (zero_point <= kMaxFastZeroPoint && fits) s.kernels = find_kernels(op, q, packed, s.between, quotient);
  if (s.kernels && quotient == kDivide && zero_point <= kMaxProductZeroPoint)
    s.corrected = find_kernels(op, q, packed, s.between, kCorrected);
  return s;
}

Spec dequantize_spec(const DequantizeSpec& checked, const ParameterTensors& parameters) {
  const CodeType& code = *checked.code;
  Spec s{};
  s.op = Op::kDequantize;
  s.parameters = parameters.get();
  s.code = &code;
  s.format = code.format;
  s.x = checked.x;
  s.y = checked.output;
  s.packed = checked.packed;
  s.floating = checked.floating;
  s.mask = code.bits == 32 ? 0xffffffffu : (1u << code.bits) - 1;
  s.flip = code.is_signed() ? 1u << (code.bits - 1) : 0;
  s.kernels = find_dequantize_kernels(s, code.is_float ? 0 : largest_zero_point(s.parameters, parameters.count()));
  return s;
}

void run_spec(const Spec& spec, const ScaleMap& map, const void* x, void* y, int x_bits, int y_bits) {
  if (spec.kernels) {
    run<FastEngine>(spec, map, x, y, x_bits, y_bits);
  } else {
    run<ExactEngine>(spec, map, x, y, x_bits, y_bits);
  }
}

}  // namespace linquant::cpu
