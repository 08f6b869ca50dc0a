// Gradients of quantize_linear (to float codes), fake_quantize_linear and dequantize_linear. The formulas stand in
// rows.inc (`slope`, float32) and here (double); the order of the sums is that of core/sum.h.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "core/sum.h"
#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

enum class Result { kFakeQuantized, kFloatCodes, kDequantized };

struct Needs {
  bool x, scale, zero_point;
};

struct Problem {
  Spec spec;
  Result of;
  bool identity;
  float bound;  // as in Gradient
  bool fast;
  DataType x, g;  // x's is dx's too
  const char* x_data;
  const char* g_data;
  char* dx_data;  // null: not needed
  int x_bits, g_bits;
};

// The largest |quotient| that rounds to a finite number of the format.
float largest_rounded(const FloatFormat& f) {
  const float top = decode_float(f.max, f), half = (top - decode_float(f.max - 1, f)) / 2;
  const float middle = top + half;
  return f.max % 2 == 0 ? middle : float_of(linquant::bits_of(middle) - 1);
}

// --- where the pieces of a sum begin ---------------------------------------------------------------------------------

// The loops around a row, in two parts: which scales a row has, and its place among the rows with the same scales.
struct Outer {
  ScaleMap loops;
  int64_t scales = 1, places = 1;

  explicit Outer(const ScaleMap& map) : loops(map) {
    --loops.count;
    for (int i = 0; i < loops.count; ++i) scales *= scale_count(loops.loop[i]), places *= place_count(loops.loop[i]);
  }
  static int64_t scale_count(const Loop& l) { return l.constant() ? 1 : (l.size + l.block - 1) / l.block; }
  static int64_t place_count(const Loop& l) { return l.constant() ? l.size : std::min(l.block, l.size); }

  struct Row {
    bool exists;
    int64_t x, y, scale;
  };
  Row row(int64_t scale, int64_t place) const {
    Row r{true, 0, 0, 0};
    for (int i = loops.count; i-- > 0;) {
      const Loop& l = loops.loop[i];
      const int64_t s = scale % scale_count(l), p = place % place_count(l);
      scale /= scale_count(l), place /= place_count(l);
      const int64_t index = l.constant() ? p : s * l.block + p;
      r.exists &= index < l.size;
      r.x += index * l.x_stride, r.y += index * l.y_stride;
      if (!l.constant()) r.scale += s * l.scale_stride;
    }
    return r;
  }
};

// --- a worker's arithmetic: terms of up to kSumPiece elements --------------------------------------------------------

template <class R>
class Terms {
 public:
  explicit Terms(const Problem& p) : p_(p), fast_(p.spec), exact_(p.spec) {}

  // Takes in the parameters of `count` runs of `block` elements, for up to n elements; `period` as in Walk.
  void fold(const Runs& runs, int64_t block, int64_t n, int64_t period) {
    walk_ = {};
    walk_.step = kElement;
    walk_.block = block;
    walk_.n = walk_.piece = n;
    walk_.period = period;
    if (p_.fast) {
      fast_.fold(runs, walk_);
    } else {
      exact_.fold(runs, walk_);
    }
  }

  // x and g as they lie; dx is written, ds and dz are left in the arrays.
  void compute(int64_t x, int64_t x_stride, int64_t y, int64_t n) {
    const char* from = p_.x_data + x * p_.x_bits / 8;
    if (x_stride != 1 && n > 1) {
      gather(from, x_stride, n, p_.x_bits / 8, gathered_);
      from = gathered_;
    }
    const char* g = p_.g_data + y * p_.g_bits / 8;
    char* to = p_.dx_data ? p_.dx_data + y * p_.x_bits / 8 : nullptr;
    if constexpr (std::is_same_v<R, float>) {
      if (p_.fast) return compute_fast(from, g, to, n);
    }
    compute_exact(from, g, to, n);
  }

  R ds[kSumPiece], dz[kSumPiece];

 private:
  static Input input(DataType t) { return t == DataType::kFloat16 ? kF16 : t == DataType::kBFloat16 ? kBF16 : kF32; }

  void compute_fast(const char* x, const char* g, char* dx, int64_t n) {
    const Kernels& k = *active_kernels();
    const auto wide = [&](const char* from, DataType type, R* buffer) -> const float* {
      if (type == DataType::kFloat32) return reinterpret_cast<const float*>(from);
      k.widen[input(type)](from, reinterpret_cast<float*>(buffer), n);
      return reinterpret_cast<const float*>(buffer);
    };
    Gradient r{};
    r.x = wide(x, p_.spec.x, x_);
    r.g = wide(g, p_.g, g_);
    const bool direct = dx && p_.x == DataType::kFloat32;
    r.dx = direct ? reinterpret_cast<float*>(dx) : reinterpret_cast<float*>(dx_);
    r.ds = reinterpret_cast<float*>(ds);
    r.dz = reinterpret_cast<float*>(dz);
    r.n = n;
    r.folded = fast_.folded();
    r.format = &p_.spec.format;
    r.bound = p_.bound;
    r.identity = p_.identity;
    k.gradient[p_.spec.quotient][p_.of == Result::kFloatCodes][p_.spec.code->is_float](r);
    if (dx && !direct) k.narrow[input(p_.x)](r.dx, dx, n);
  }

  void compute_exact(const char* x, const char* g, char* dx, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t run = i / walk_.block;
      const R slope = p_.of == Result::kDequantized
                          ? dequantized(x, i, load_value(p_.g, g, i), run)
                          : quantized(load_value(p_.spec.x, x, i), load_value(p_.g, g, i), run, i);
      if (dx) store_value(p_.x, dx, i, static_cast<double>(slope));
    }
  }

  R dequantized(const char* x, int64_t i, double gradient, int64_t run) {
    const Spec& s = p_.spec;
    const R g = static_cast<R>(gradient), scale = static_cast<R>(exact_.scale(run));
    double d;
    if (s.code->is_float) {
      const double v =
          s.floating ? load_value(s.x, x, i) : decode_float(static_cast<uint32_t>(load_code(s, x, i)), s.code->format);
      d = v - (exact_.offset(run) + 0.0);
    } else {
      d = s.floating ? load_value(s.x, x, i) - static_cast<double>(exact_.zero_point(run))
                     : exact::difference(load_code(s, x, i), exact_.zero_point(run), true);
    }
    ds[i] = g * static_cast<R>(d);
    dz[i] = -(g * scale);
    return g * scale;
  }

  R quantized(double x, double gradient, int64_t run, int64_t i) {
    const Spec& s = p_.spec;
    const R g = static_cast<R>(gradient), scale = static_cast<R>(exact_.scale(run));
    const int64_t zero_point = exact_.zero_point(run);
    const Sum f = form_quotient(s, x, exact_.scale(run), zero_point, exact_.offset(run));
    const bool number = f.sum == f.sum;
    bool inside;
    double value;
    if (s.code->is_float) {
      inside = (f.sum < 0 ? -f.sum : f.sum) <= p_.bound;
      const float q = s.wide ? exact::to_odd(f.sum) : static_cast<float>(f.sum);
      value = decode_float(encode_float(q, s.format), s.format) - (exact_.offset(run) + 0.0);
    } else {
      const int64_t base = s.arithmetic == Arithmetic::kOneDnn ? 0 : zero_point;
      const int64_t code = exact::encode_integer(f.sum, base, s.qmin - 1, s.qmax + 1);
      inside = number && code >= s.qmin && code <= s.qmax;
      value = exact::difference(std::clamp(code, s.qmin, s.qmax), zero_point, true);
    }
    const R quotient = static_cast<R>(f.quotient);
    if (p_.of == Result::kFloatCodes) {
      ds[i] = inside ? -(g * quotient) / scale : R(0);
      dz[i] = inside ? g : R(0);
      return inside ? g / scale : R(0);
    }
    ds[i] = number ? g * (static_cast<R>(value) - (inside ? quotient : R(0))) : R(0);
    dz[i] = inside || !number ? R(0) : -(g * scale);
    return inside || (p_.identity && number) ? g : R(0);
  }

  const Problem& p_;
  FastEngine fast_;
  ExactEngine exact_;
  Walk walk_{};
  R x_[kSumPiece], g_[kSumPiece], dx_[kSumPiece];
  alignas(64) char gathered_[kSumPiece * 8];
};

template <class R>
R sum_of(const R* t, int64_t n) {
  if constexpr (std::is_same_v<R, float>) {
    if (const Kernels* k = active_kernels()) return k->sum(t, n);
  }
  return sum_piece(t, n);
}

template <class R>
void add_to(const R* t, R* to, int64_t n) {
  if constexpr (std::is_same_v<R, float>) {
    if (const Kernels* k = active_kernels()) return k->add(t, to, n);
  }
  for (int64_t i = 0; i < n; ++i) to[i] += t[i];
}

// --- the walk --------------------------------------------------------------------------------------------------------

// Sums of pieces: for each scale, those of its pieces one after the other.
template <class R>
struct Sums {
  int64_t pieces;
  std::vector<R> ds, dz;
};

// Rows whose runs of elements share a scale.
template <class R>
void walk_runs(const Problem& p, const ScaleMap& map, int64_t count, const Needs& needs, Sums<R>& sums) {
  const Loop inner = map.loop[map.count - 1];
  const Outer outer(map);
  const int64_t block = inner.constant() ? std::max<int64_t>(inner.size, 1) : inner.block;
  const int64_t scale_stride = inner.constant() ? 0 : inner.scale_stride;
  const int64_t runs = (inner.size + block - 1) / block;
  const int64_t pieces = (block + kSumPiece - 1) / kSumPiece;                           // of a run
  const int64_t together = std::max<int64_t>(1, std::min(runs, kSumPiece / block));     // runs taken in one go
  const int64_t units = pieces > 1 ? runs * pieces : (runs + together - 1) / together;  // of a row
  sums.pieces = outer.places * pieces;
  if (needs.scale) sums.ds.assign(count * sums.pieces, R(0));
  if (needs.zero_point) sums.dz.assign(count * sums.pieces, R(0));
  const auto work = [&](int64_t begin, int64_t end) {
    const IeeeFloats ieee;
    const ThreadLocal<Terms<R>> terms(p);
    Runs folded{-1, 0, 0, 0};
    for (int64_t u = begin; u < end; ++u) {
      const int64_t unit = u % units, row_number = u / units;
      const Outer::Row row = outer.row(row_number / outer.places, row_number % outer.places);
      if (!row.exists) continue;
      const int64_t run = pieces > 1 ? unit / pieces : unit * together, piece = pieces > 1 ? unit % pieces : 0;
      const int64_t start = run * block + piece * kSumPiece;
      const int64_t limit = pieces > 1 ? std::min(kSumPiece, block - piece * kSumPiece) : together * block;
      const int64_t n = std::min(limit, inner.size - start);
      if (n <= 0) continue;
      const Runs now{row.scale + run * scale_stride, scale_stride, (n + block - 1) / block, 0};
      const int64_t capacity = std::min(kSumPiece, now.count * block);
      if (!(now == folded)) terms->fold(now, std::min(block, capacity), capacity, capacity), folded = now;
      terms->compute(row.x + start * inner.x_stride, inner.x_stride, row.y + start, n);
      for (int64_t r = 0; r < now.count; ++r) {
        const int64_t at = (now.first + r * scale_stride) * sums.pieces + row_number % outer.places * pieces + piece;
        const int64_t length = std::min(block, n - r * block);
        if (needs.scale) sums.ds[at] = sum_of(terms->ds + r * block, length);
        if (needs.zero_point) sums.dz[at] = sum_of(terms->dz + r * block, length);
      }
    }
  };
  const int64_t each = std::max<int64_t>(1, std::min(inner.size, pieces > 1 ? kSumPiece : together * block));
  torch::stable::parallel_for(0, outer.scales * outer.places * units, std::max<int64_t>(1, 16384 / each), work);
}

// Rows in which each element has a scale of its own.
template <class R>
void walk_columns(const Problem& p, const ScaleMap& map, int64_t count, const Needs& needs, Sums<R>& sums) {
  const Loop inner = map.loop[map.count - 1];
  const Outer outer(map);
  const int64_t groups = (outer.places + kSumRows - 1) / kSumRows;
  // Short rows that follow one another are taken several at a time.
  const Loop* next = map.count > 1 ? &map.loop[map.count - 2] : nullptr;
  const bool joined = p.fast && next && next->constant() && next->y_stride == inner.size && inner.x_stride == 1 &&
                      next->x_stride == inner.size && inner.size <= kSumPiece / 2;
  const int64_t most = joined ? std::min(kSumRows, kSumPiece / inner.size) : 1;
  const int64_t tile = std::min(inner.size, kSumPiece);
  const int64_t tiles = (inner.size + tile - 1) / tile;
  sums.pieces = groups;
  if (needs.scale) sums.ds.assign(count * groups, R(0));
  if (needs.zero_point) sums.dz.assign(count * groups, R(0));
  const auto work = [&](int64_t begin, int64_t end) {
    const IeeeFloats ieee;
    const ThreadLocal<Terms<R>> terms(p);
    std::vector<R> ds(tile), dz(tile);
    Runs folded{-1, 0, 0, 0};
    for (int64_t u = begin; u < end; ++u) {
      const int64_t start = u % tiles * tile, group = u / tiles % groups, scale = u / tiles / groups;
      const int64_t n = std::min(tile, inner.size - start);
      const int64_t last = std::min(outer.places, (group + 1) * kSumRows);
      std::fill(ds.begin(), ds.end(), R(0));
      std::fill(dz.begin(), dz.end(), R(0));
      for (int64_t place = group * kSumRows; place < last;) {
        const Outer::Row row = outer.row(scale, place);
        const int64_t rows = joined ? std::min({most, last - place, next->size - place % next->size}) : 1;
        place += rows;
        if (!row.exists) continue;
        const Runs now{row.scale + start * inner.scale_stride, inner.scale_stride, n, 0};
        if (!(now == folded)) terms->fold(now, 1, n * most, n), folded = now;
        terms->compute(row.x + start * inner.x_stride, inner.x_stride, row.y + start, n * rows);
        for (int64_t r = 0; r < rows; ++r) {
          if (needs.scale) add_to(terms->ds + r * n, ds.data(), n);
          if (needs.zero_point) add_to(terms->dz + r * n, dz.data(), n);
        }
      }
      const int64_t first = outer.row(scale, 0).scale + start * inner.scale_stride;
      for (int64_t j = 0; j < n; ++j) {
        const int64_t at = (first + j * inner.scale_stride) * groups + group;
        if (needs.scale) sums.ds[at] = ds[j];
        if (needs.zero_point) sums.dz[at] = dz[j];
      }
    }
  };
  const int64_t each = std::max<int64_t>(1, tile * std::min(outer.places, kSumRows));
  torch::stable::parallel_for(0, outer.scales * groups * tiles, std::max<int64_t>(1, 16384 / each), work);
}

template <class R>
void finish_sums(std::vector<R>& t, int64_t pieces, int64_t count, DataType type, void* to) {
  if (t.empty()) return;
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, 16384 / pieces), [&](int64_t begin, int64_t end) {
    const IeeeFloats ieee;
    for (int64_t i = begin; i < end; ++i)
      store_value(type, to, i, static_cast<double>(sum_all(t.data() + i * pieces, pieces)));
  });
}

template <class R>
void walk(const Problem& p, const ScaleMap& map, const Needs& needs, const Tensor& dscale, const Tensor& dzero) {
  const Loop& inner = map.loop[map.count - 1];
  const int64_t count = std::max(dscale.numel(), dzero.numel());
  Sums<R> sums;
  if (!inner.constant() && inner.block == 1) {
    walk_columns<R>(p, map, count, needs, sums);
  } else {
    walk_runs<R>(p, map, count, needs, sums);
  }
  if (needs.scale) finish_sums(sums.ds, sums.pieces, count, type_of(dscale), dscale.mutable_data_ptr());
  if (needs.zero_point) finish_sums(sums.dz, sums.pieces, count, type_of(dzero), dzero.mutable_data_ptr());
}

// --- the ops ---------------------------------------------------------------------------------------------------------

using Gradients = std::tuple<Tensor, Tensor, Tensor>;

struct Arguments {
  const char* op;
  const Tensor &grad, &x, &scale;
  const std::optional<Tensor>& zero_point;
  int64_t axis;
  Sizes block_size;
  Needs needs;
};

Tensor nothing(const Arguments& a) {
  return Output::contiguous(a.op, "", a.grad, {0}, DataType::kFloat32, std::nullopt).tensor();
}

void zero(const Tensor& t) {
  memset(t.mutable_data_ptr(), 0, static_cast<size_t>(t.numel() * static_cast<int64_t>(t.element_size())));
}

// `x`: the tensor that spec.x describes, of `sizes`, not packed. dx has x's type, and grad's where x holds codes.
Gradients run(const Arguments& a, const Tensor& x, const Sizes& sizes, const Granularity& g, Spec spec, Result of,
              bool identity) {
  const bool floating = is_float(type_of(a.x));
  const bool needs_zero = a.needs.zero_point && a.zero_point && is_float(type_of(*a.zero_point));
  const bool needs_scale = a.needs.scale && is_float(type_of(a.scale));
  const Needs needs{a.needs.x && floating, needs_scale, needs_zero};
  const Tensor dx = needs.x ? Output::like(a.op, "", x, type_of(x), std::nullopt).tensor() : nothing(a);
  const auto like = [&](const Tensor& t) {
    return Output::contiguous(a.op, "", t, sizes_of(t), type_of(t), std::nullopt).tensor();
  };
  const Tensor dscale = needs.scale ? like(a.scale) : nothing(a);
  const Tensor dzero = needs.zero_point ? like(*a.zero_point) : nothing(a);
  if (needs.scale) zero(dscale);
  if (needs.zero_point) zero(dzero);
  if (x.numel() == 0 || !(needs.x || needs.scale || needs.zero_point)) return {dx, dscale, dzero};
  // The incoming gradient in the layout of dx.
  Tensor grad = a.grad;
  const Tensor layout = needs.x ? dx : Output::like(a.op, "", x, type_of(a.grad), std::nullopt).tensor();
  if (!(strides_of(grad) == strides_of(layout))) {
    grad = Output::like(a.op, "", layout, type_of(a.grad), std::nullopt).tensor();
    torch::stable::copy_(grad, a.grad);
  }
  const DataType g_type = type_of(grad);
  const bool wide = spec.wide || spec.x == DataType::kFloat64 || g_type == DataType::kFloat64 ||
                    spec.parameters.scale_type == DataType::kFloat64;
  // The clamp reaches one further than the codes do; and a float16 quotient must not reach the bounds as infinity.
  const bool near = spec.quotient != kDivideF16 || spec.code->is_float
                        ? spec.largest_zero_point < kMaxFastZeroPoint - 1
                        : spec.code->bits <= 8 && spec.largest_zero_point <= 32768;
  const bool fast = of != Result::kDequantized && active_kernels() && !wide && near && spec.code->bits != 32 &&
                    spec.x != DataType::kInt32;
  spec.format = spec.code->format.saturating(true);
  Problem p{};
  p.spec = spec;
  p.of = of;
  p.identity = identity;
  p.bound = spec.code->is_float ? largest_rounded(spec.code->format) : 0.0f;
  p.fast = fast;
  p.g = g_type;
  p.x = type_of(x);
  p.x_data = static_cast<const char*>(x.const_data_ptr());
  p.g_data = static_cast<const char*>(grad.const_data_ptr());
  p.dx_data = needs.x ? static_cast<char*>(dx.mutable_data_ptr()) : nullptr;
  p.x_bits = static_cast<int>(x.element_size()) * 8;
  p.g_bits = bits_of(g_type);
  const ScaleMap map = make_map(a.op, sizes, strides_of(x), strides_of(grad), g);
  if (wide) {
    walk<double>(p, map, needs, dscale, dzero);
  } else {
    walk<float>(p, map, needs, dscale, dzero);
  }
  return {dx, dscale, dzero};
}

Gradients quantize_backward(const Arguments& a, const QuantizeArguments& q, Result of, bool identity) {
  const QuantizeSpec checked = check_quantize(q);
  const Sizes sizes = sizes_of(a.x);
  check_gradient(a.op, a.grad, a.x, sizes);
  const Granularity g = resolve_granularity(a.op, sizes, a.scale, a.zero_point, a.axis, a.block_size);
  const ParameterTensors parameters(a.scale, a.zero_point, checked.qmin, checked.qmax);
  return run(a, a.x, sizes, g, quantize_spec(Op::kFakeQuantize, checked, parameters, false), of, identity);
}

Gradients quantize_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                   const std::optional<Tensor>& zero_point, int64_t axis,
                                   const std::vector<int64_t>& block_size, int64_t output_dtype, int64_t precision,
                                   std::optional<int64_t> quant_min, std::optional<int64_t> quant_max,
                                   const std::string& arithmetic, bool need_x, bool need_scale, bool need_zero_point) {
  constexpr char kOp[] = "quantize_linear_backward";
  return quantize_backward(
      {kOp, grad, x, scale, zero_point, axis, block_size, {need_x, need_scale, need_zero_point}},
      {kOp, x, scale, zero_point, axis, block_size, output_dtype, true, precision, quant_min, quant_max, arithmetic},
      Result::kFloatCodes, false);
}

Gradients fake_quantize_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                        const std::optional<Tensor>& zero_point, int64_t axis,
                                        const std::vector<int64_t>& block_size, int64_t output_dtype, int64_t precision,
                                        std::optional<int64_t> quant_min, std::optional<int64_t> quant_max,
                                        const std::string& arithmetic, const std::string& ste, bool need_x,
                                        bool need_scale, bool need_zero_point) {
  constexpr char kOp[] = "fake_quantize_linear_backward";
  return quantize_backward(
      {kOp, grad, x, scale, zero_point, axis, block_size, {need_x, need_scale, need_zero_point}},
      {kOp, x, scale, zero_point, axis, block_size, output_dtype, true, precision, quant_min, quant_max, arithmetic},
      Result::kFakeQuantized, check_ste(kOp, ste));
}

Gradients dequantize_linear_backward(const Tensor& grad, const Tensor& x, const Tensor& scale,
                                     const std::optional<Tensor>& zero_point, int64_t axis,
                                     const std::vector<int64_t>& block_size, int64_t x_dtype,
                                     std::optional<int64_t> packed_size, bool need_x, bool need_scale,
                                     bool need_zero_point) {
  constexpr char kOp[] = "dequantize_linear_backward";
  const DequantizeSpec checked =
      check_dequantize({kOp, x, scale, zero_point, axis, block_size, 0, x_dtype, packed_size});
  check_gradient(kOp, grad, x, checked.sizes);
  const Granularity g = resolve_granularity(kOp, checked.sizes, scale, zero_point, axis, block_size);
  const CodeType& code = *checked.code;
  const ParameterTensors parameters(scale, zero_point, code.min, code.max);
  Spec spec = dequantize_spec(checked, parameters);
  Tensor codes = x;
  if (checked.packed) {
    codes = unpack(x, static_cast<int64_t>(code.type), packed_size);
    spec.packed = false;
  }
  return run({kOp, grad, x, scale, zero_point, axis, block_size, {need_x, need_scale, need_zero_point}}, codes,
             checked.sizes, g, spec, Result::kDequantized, false);
}

}  // namespace
}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CPU, m) {
  m.impl("quantize_linear_backward", TORCH_BOX(&linquant::cpu::quantize_linear_backward));
  m.impl("fake_quantize_linear_backward", TORCH_BOX(&linquant::cpu::fake_quantize_linear_backward));
  m.impl("dequantize_linear_backward", TORCH_BOX(&linquant::cpu::dequantize_linear_backward));
}
