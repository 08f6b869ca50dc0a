#include "plan.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace linquant {
namespace {

// --- sentences -------------------------------------------------------------------------------------------------------

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream s;
  (s << ... << parts);
  throw std::runtime_error(s.str());
}

struct Shape {
  const Sizes& sizes;
};

std::ostream& operator<<(std::ostream& s, const Shape& shape) {
  s << '[';
  for (size_t d = 0; d < shape.sizes.size(); ++d) s << (d ? ", " : "") << shape.sizes[d];
  return s << ']';
}

constexpr char kCodeNumbers[] =
    "uint8 (2), int8 (3), uint16 (4), int16 (5), int32 (6), float8_e4m3fn (17), float8_e4m3fnuz (18), float8_e5m2 "
    "(19), "
    "float8_e5m2fnuz (20), uint4 (21), int4 (22), float4_e2m1 (23), uint2 (25) or int2 (26)";
constexpr char kFloatNumbers[] = "float32 (1), float16 (10), float64 (11) or bfloat16 (16)";

// --- types -----------------------------------------------------------------------------------------------------------

struct TorchType {
  DataType type;
  const char* name;
  int32_t (*code)();
};

// Torch's types by the numbers that its C interface gives them.
class TorchTypes {
 public:
  static const TorchTypes& get() {
    static const TorchTypes types;
    return types;
  }
  const TorchType& at(int32_t code) const {
    return code >= 0 && code < static_cast<int32_t>(by_code_.size()) ? by_code_[code] : unknown_;
  }
  int32_t code(DataType type) const { return by_type_[static_cast<int>(type)]; }

 private:
  TorchTypes() {
    const TorchType all[] = {
        {DataType::kFloat32, "float32", aoti_torch_dtype_float32},
        {DataType::kUInt8, "uint8", aoti_torch_dtype_uint8},
        {DataType::kInt8, "int8", aoti_torch_dtype_int8},
        {DataType::kUInt16, "uint16", aoti_torch_dtype_uint16},
        {DataType::kInt16, "int16", aoti_torch_dtype_int16},
        {DataType::kInt32, "int32", aoti_torch_dtype_int32},
        {DataType::kInt64, "int64", aoti_torch_dtype_int64},
        {DataType::kFloat16, "float16", aoti_torch_dtype_float16},
        {DataType::kFloat64, "float64", aoti_torch_dtype_float64},
        {DataType::kUInt32, "uint32", aoti_torch_dtype_uint32},
        {DataType::kBFloat16, "bfloat16", aoti_torch_dtype_bfloat16},
        {DataType::kFloat8E4M3FN, "float8_e4m3fn", aoti_torch_dtype_float8_e4m3fn},
        {DataType::kFloat8E4M3FNUZ, "float8_e4m3fnuz", aoti_torch_dtype_float8_e4m3fnuz},
        {DataType::kFloat8E5M2, "float8_e5m2", aoti_torch_dtype_float8_e5m2},
        {DataType::kFloat8E5M2FNUZ, "float8_e5m2fnuz", aoti_torch_dtype_float8_e5m2fnuz},
        {DataType::kFloat8E8M0, "float8_e8m0fnu", torch_dtype_float8_e8m0fnu},
        {DataType::kNone, "bool", aoti_torch_dtype_bool},
        {DataType::kNone, "uint64", aoti_torch_dtype_uint64},
        {DataType::kNone, "complex32", aoti_torch_dtype_complex32},
        {DataType::kNone, "complex64", aoti_torch_dtype_complex64},
        {DataType::kNone, "complex128", aoti_torch_dtype_complex128},
        {DataType::kNone, "float4_e2m1fn_x2", torch_dtype_float4_e2m1fn_x2},
    };
    by_code_.fill(unknown_);
    for (const TorchType& t : all) {
      const int32_t code = t.code();
      if (code >= 0 && code < static_cast<int32_t>(by_code_.size())) by_code_[code] = t;
      if (t.type != DataType::kNone) by_type_[static_cast<int>(t.type)] = code;
    }
  }
  TorchType unknown_{DataType::kNone, "another type", nullptr};
  std::array<TorchType, 128> by_code_;
  std::array<int32_t, 32> by_type_{};
};

const TorchType& torch_type(const Tensor& t) {
  int32_t code;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &code));
  return TorchTypes::get().at(code);
}

const char* name_of(const Tensor& t) { return torch_type(t).name; }
const char* name_of(DataType type) { return TorchTypes::get().at(TorchTypes::get().code(type)).name; }

bool is_integer(DataType t) {
  switch (t) {
    case DataType::kUInt8:
    case DataType::kInt8:
    case DataType::kUInt16:
    case DataType::kInt16:
    case DataType::kInt32:
    case DataType::kInt64:
    case DataType::kUInt32:
      return true;
    default:
      return false;
  }
}

bool is_float8(const CodeType& c) { return c.is_float && c.bits == 8; }

int64_t number(DataType t) { return static_cast<int64_t>(t); }

// --- devices ---------------------------------------------------------------------------------------------------------

struct Device {
  int32_t type, index;
  bool operator==(const Device& o) const { return type == o.type && index == o.index; }
};

Device device_of(const Tensor& t) {
  Device d{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &d.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &d.index));
  return d;
}

std::ostream& operator<<(std::ostream& s, const Device& d) {
  if (d.type == aoti_torch_device_type_cpu()) return s << "cpu";
  if (d.type == aoti_torch_device_type_meta()) return s << "meta";
  s << (d.type == aoti_torch_device_type_cuda() ? "cuda" : "device");
  return s << ':' << std::max(d.index, 0);
}

void check_device(const char* op, const char* name, const Tensor& x, const Tensor& t) {
  const Device want = device_of(x), got = device_of(t);
  if (!(want == got)) fail(op, ": ", name, " must be on x's device ", want, ", but got ", got, ".");
}

// --- checks that several ops share -----------------------------------------------------------------------------------

void check_scale(const char* op, const Tensor& x, const Tensor& scale, const std::optional<Tensor>& zero_point) {
  const DataType t = type_of(scale);
  if (!is_float(t) && t != DataType::kFloat8E8M0)
    fail(op, ": scale must be float32, float16, bfloat16, float64 or float8_e8m0fnu, but got ", name_of(scale), ".");
  check_device(op, "scale", x, scale);
  if (zero_point) check_device(op, "zero_point", x, *zero_point);
}

void check_zero_point_type(const char* op, const CodeType& code, const std::optional<Tensor>& zero_point) {
  if (!zero_point) return;
  const DataType t = type_of(*zero_point);
  if (is_float8(code)) {
    if (t != code.type)
      fail(op, ": zero_point must be ", code.name, " for ", code.name, " codes, but got ", name_of(*zero_point), ".");
  } else if (code.is_float) {
    if (t != DataType::kUInt8)
      fail(op, ": zero_point must be uint8 for ", code.name, " codes, but got ", name_of(*zero_point), ".");
  } else if (!is_integer(t) && !is_float(t)) {
    fail(op, ": zero_point must be an integer or float32, float16, bfloat16 or float64 tensor for ", code.name,
         " codes, but got ", name_of(*zero_point), ".");
  }
}

const CodeType& check_output_type(const QuantizeArguments& a) {
  const CodeType* code = find_code_type(a.output_dtype);
  if (a.output_dtype != 0 && !code)
    fail(a.op, ": output_dtype must be 0 or the number of ", kCodeNumbers, ", but got ", a.output_dtype, ".");
  if (code) return *code;
  if (!a.zero_point) return *find_code_type(number(DataType::kUInt8));
  const DataType t = type_of(*a.zero_point);
  code = t == DataType::kNone ? nullptr : find_code_type(number(t));
  if (!code) fail(a.op, ": output_dtype must be given when zero_point is ", name_of(*a.zero_point), ".");
  return *code;
}

Arithmetic check_arithmetic(const QuantizeArguments& a, const CodeType& code) {
  Arithmetic arithmetic;
  if (a.arithmetic == "onnx") {
    return Arithmetic::kOnnx;
  } else if (a.arithmetic == "onednn") {
    arithmetic = Arithmetic::kOneDnn;
  } else if (a.arithmetic == "executorch") {
    arithmetic = Arithmetic::kExecuTorch;
  } else {
    fail(a.op, ": arithmetic must be \"onnx\", \"onednn\" or \"executorch\", but got \"", a.arithmetic, "\".");
  }
  if (code.is_float)
    fail(a.op, ": arithmetic must be \"onnx\" for ", code.name, " codes, but got \"", a.arithmetic, "\".");
  if (a.precision > 1)
    fail(a.op, ": precision must be 0 or 1 (float32) with arithmetic \"", a.arithmetic, "\", but got ", a.precision,
         ".");
  return arithmetic;
}

int64_t check_limit(const QuantizeArguments& a, const char* name, const std::optional<int64_t>& limit,
                    const CodeType& code, int64_t otherwise) {
  if (!limit) return otherwise;
  if (code.is_float) fail(a.op, ": ", name, " must be left out for ", code.name, " codes, but got ", *limit, ".");
  if (*limit < code.min || *limit > code.max)
    fail(a.op, ": ", name, " must be within [", code.min, ", ", code.max, "] for ", code.name, " codes, but got ",
         *limit, ".");
  return *limit;
}

// The unpacked sizes of packed codes.
Sizes check_packed_size(const char* op, const Tensor& x, int per_byte, int64_t packed_size) {
  if (type_of(x) != DataType::kUInt8) fail(op, ": x must be uint8 to be unpacked, but got ", name_of(x), ".");
  Sizes sizes = sizes_of(x);
  if (sizes.empty()) fail(op, ": x must have at least one dimension to be unpacked, but got a 0-d tensor.");
  const int64_t bytes = sizes.back();
  int64_t most;
  if (__builtin_mul_overflow(bytes, per_byte, &most))
    fail(op, ": x must not hold more codes than int64 counts, but got shape ", Shape{sizes}, ".");
  const int64_t least = std::max<int64_t>(0, most - per_byte + 1);
  if (packed_size < least || packed_size > most)
    fail(op, ": packed_size must fit the ", bytes, " bytes of x's last dimension, which hold ", least, " to ", most,
         " codes, but got ", packed_size, ".");
  sizes.back() = packed_size;
  return sizes;
}

int64_t blocks(int64_t size, int64_t block) { return size / block + (size % block != 0); }

void check_block_size(const char* op, const Sizes& x_sizes, const Sizes& block_size) {
  if (block_size.size() != 1 && x_sizes.size() < 2)
    fail(op, ": block_size must have 1 entry, but got ", block_size.size(), ".");
  if (block_size.size() != 1 && block_size.size() != x_sizes.size())
    fail(op, ": block_size must have 1 or ", x_sizes.size(), " entries (one per dimension of x), but got ",
         block_size.size(), ".");
  for (int64_t b : block_size)
    if (b < 0) fail(op, ": block_size must not be negative, but got ", b, ".");
}

int64_t check_axis(const char* op, const Sizes& x_sizes, int64_t axis) {
  const int64_t rank = static_cast<int64_t>(x_sizes.size());
  if (rank == 0) fail(op, ": axis must be absent for a 0-d x, but got ", axis, ".");
  if (axis < -rank || axis >= rank)
    fail(op, ": axis must be in [", -rank, ", ", rank - 1, "] for x of shape ", Shape{x_sizes}, ", but got ", axis, ".",
         rank == 1 ? " Pass axis=0." : "");
  return axis < 0 ? axis + rank : axis;
}

// Blocks per dimension, and how many scales there are in each.
Granularity blocked(const Sizes& x_sizes, int64_t axis, const Sizes& block_size, Sizes& counts) {
  const size_t rank = x_sizes.size();
  Granularity g{Sizes(rank, 1), Sizes(rank)};
  counts = Sizes(rank);
  for (size_t d = 0; d < rank; ++d) {
    const bool nd = block_size.size() > 1;
    const int64_t b = nd ? block_size[d] : (static_cast<int64_t>(d) == axis ? block_size[0] : 1);
    g.block[d] = b == 0 ? std::max<int64_t>(x_sizes[d], 1) : b;
    counts[d] = b == 0 ? 1 : blocks(x_sizes[d], b);
  }
  g.stride = contiguous_strides(counts);
  return g;
}

Granularity per_axis(const Sizes& x_sizes, int64_t axis) {
  Granularity g{x_sizes, Sizes(x_sizes.size(), 0)};
  for (int64_t& b : g.block) b = std::max<int64_t>(b, 1);
  g.block[axis] = 1;
  g.stride[axis] = 1;
  return g;
}

Granularity per_tensor(const Sizes& x_sizes) {
  Granularity g{x_sizes, Sizes(x_sizes.size(), 0)};
  for (int64_t& b : g.block) b = std::max<int64_t>(b, 1);
  return g;
}

[[noreturn]] void fail_per_axis(const char* op, const Sizes& x_sizes, const Sizes& scale_sizes, int64_t axis_given,
                                int64_t axis) {
  int64_t other = -1;
  for (size_t d = 0; d < x_sizes.size(); ++d)
    if (x_sizes[d] == scale_sizes[0]) other = other == -1 ? static_cast<int64_t>(d) : -2;
  std::ostringstream hint;
  if (other >= 0)
    hint << " Pass axis=" << other << " to quantize along the dimension of size " << scale_sizes[0] << '.';
  fail(op, ": scale must have ", x_sizes[axis], " elements to match x.size(", axis_given, "), but got shape ",
       Shape{scale_sizes}, ".", hint.str());
}

// --- memory ----------------------------------------------------------------------------------------------------------

bool is_dense(const Sizes& sizes, const Sizes& strides) {
  std::array<size_t, kMaxDimensions> order;
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(sizes.size());
  std::iota(order.begin(), end, 0);
  std::sort(order.begin(), end, [&](size_t a, size_t b) {
    if (sizes[a] < 2 || sizes[b] < 2) return sizes[a] >= 2 && sizes[b] < 2;
    return strides[a] < strides[b];
  });
  int64_t expected = 1;
  for (auto d = order.begin(); d != end && sizes[*d] >= 2; ++d) {
    if (strides[*d] != expected) return false;
    expected *= sizes[*d];
  }
  return true;
}

Tensor empty(const Sizes& sizes, const Sizes& strides, DataType type, const Tensor& on) {
  const Device device = device_of(on);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
                                                  TorchTypes::get().code(type), device.type, device.index, &handle));
  return Tensor(handle);
}

// torch.empty_like's strides for a tensor with gaps or overlaps: PyTorch's own rule, asked from PyTorch without memory.
Sizes empty_like_strides(const Tensor& t) {
  using torch::stable::detail::from;
  const std::optional<torch::stable::Device> meta(torch::stable::Device(torch::headeronly::DeviceType::Meta));
  std::array<StableIValue, 6> stack{from(t),    from(std::nullopt), from(std::nullopt),
                                    from(meta), from(std::nullopt), from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
  return strides_of(torch::stable::detail::to<Tensor>(stack[0]));
}

int64_t element_size(const Tensor& t) { return static_cast<int64_t>(t.element_size()); }

// First and one-past-last byte.
std::pair<const char*, const char*> extent(const Tensor& t) {
  const Sizes sizes = sizes_of(t), strides = strides_of(t);
  int64_t last = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return {nullptr, nullptr};
    last += (sizes[d] - 1) * strides[d];
  }
  const char* p = static_cast<const char*>(t.const_data_ptr());
  return {p, p + (last + 1) * element_size(t)};
}

}  // namespace

// --- public ----------------------------------------------------------------------------------------------------------

size_t Sizes::checked(size_t n) {
  if (n > kMaxDimensions) fail("linquant: tensors must have at most ", kMaxDimensions, " dimensions, but got ", n, ".");
  return n;
}

DataType type_of(const Tensor& t) { return torch_type(t).type; }

bool is_float(DataType t) {
  return t == DataType::kFloat32 || t == DataType::kFloat16 || t == DataType::kBFloat16 || t == DataType::kFloat64;
}

DataType float_code_type(const CodeType& code, DataType x) {
  if (code.bits == 32 || x == DataType::kFloat64) return DataType::kFloat64;
  // float16 holds integers up to 2048, bfloat16 up to 256, and both every float8 number.
  return code.bits == 16 || x == DataType::kInt32 ? DataType::kFloat32 : x;
}

bool check_ste(const char* op, const std::string& ste) {
  if (ste != "clipped" && ste != "identity")
    fail(op, ": ste must be \"clipped\" or \"identity\", but got \"", ste, "\".");
  return ste == "identity";
}

void check_gradient(const char* op, const Tensor& grad, const Tensor& x, const Sizes& sizes) {
  if (!is_float(type_of(grad)))
    fail(op, ": grad must be float32, float16, bfloat16 or float64, but got ", name_of(grad), ".");
  check_device(op, "grad", x, grad);
  if (sizes_of(grad) != sizes)
    fail(op, ": grad must have shape ", Shape{sizes}, ", but got shape ", Shape{sizes_of(grad)}, ".");
}

DataType storage_type(const CodeType& code) {
  if (!code.sub_byte()) return code.type;
  return code.is_signed() ? DataType::kInt8 : DataType::kUInt8;
}

Sizes sizes_of(const Tensor& t) {
  const auto s = t.sizes();
  return Sizes(s.begin(), s.end());
}

Sizes strides_of(const Tensor& t) {
  const auto s = t.strides();
  return Sizes(s.begin(), s.end());
}

Sizes packed_sizes(const Sizes& sizes, int per_byte) {
  Sizes packed = sizes;
  packed.back() = blocks(packed.back(), per_byte);
  return packed;
}

Sizes contiguous_strides(const Sizes& sizes, int per_byte) {
  Sizes strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    const int64_t size = d + 1 == sizes.size() ? blocks(sizes[d], per_byte) * per_byte : sizes[d];
    stride *= std::max<int64_t>(size, 1);
  }
  return strides;
}

Tensor row_major(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

void check_input(const char* op, const Tensor& x) {
  const DataType t = type_of(x);
  if (!is_float(t) && t != DataType::kInt32)
    fail(op, ": x must be float32, float16, bfloat16, float64 or int32, but got ", name_of(x), ".");
}

const CodeType* check_dynamic_output(const char* op, int64_t output_dtype) {
  const CodeType* code = find_code_type(output_dtype);
  if (!code || code->is_float || code->bits > 16)
    fail(op, ": output_dtype must be the number of an integer type of at most 16 bits, but got ", output_dtype, ".");
  return code;
}

QuantizeSpec check_quantize(const QuantizeArguments& a) {
  check_input(a.op, a.x);
  check_scale(a.op, a.x, a.scale, a.zero_point);
  const CodeType& code = check_output_type(a);
  check_zero_point_type(a.op, code, a.zero_point);
  if (a.precision != 0 && (a.precision < 0 || a.precision > 16 || !is_float(static_cast<DataType>(a.precision))))
    fail(a.op, ": precision must be 0 or the number of ", kFloatNumbers, ", but got ", a.precision, ".");

  QuantizeSpec s{};
  s.code = &code;
  s.format = code.format.saturating(a.saturate);
  s.arithmetic = check_arithmetic(a, code);
  s.qmin = check_limit(a, "quant_min", a.quant_min, code, code.min);
  s.qmax = check_limit(a, "quant_max", a.quant_max, code, code.max);
  if (!code.is_float && s.qmin >= s.qmax)
    fail(a.op, ": quant_min must be less than quant_max, but got ", s.qmin, " and ", s.qmax, ".");
  if (a.packed && !code.sub_byte())
    fail(a.op, ": packed must be False for ", code.name,
         " codes, but got True. Only 4-bit and 2-bit codes are packed.");
  if (a.packed && a.x.dim() == 0)
    fail(a.op, ": x must have at least one dimension to be packed, but got a 0-d tensor.");

  s.x = type_of(a.x);
  s.scale = type_of(a.scale);
  const DataType own = s.scale == DataType::kFloat8E8M0 ? DataType::kFloat32 : s.scale;
  s.precision = a.precision == 0 ? own : static_cast<DataType>(a.precision);
  s.wide = s.x == DataType::kFloat64 || s.scale == DataType::kFloat64 || s.precision == DataType::kFloat64;
  return s;
}

DequantizeSpec check_dequantize(const DequantizeArguments& a) {
  const DataType t = type_of(a.x);
  const CodeType* own = t == DataType::kNone ? nullptr : find_code_type(number(t));
  const bool floating = is_float(t);
  if (!own && !floating)
    fail(a.op,
         ": x must be uint8, int8, uint16, int16, int32, a float8 type, or codes as float32, float16, bfloat16 or ",
         "float64, but got ", name_of(a.x), ".");
  check_scale(a.op, a.x, a.scale, a.zero_point);
  const bool valid_output =
      a.output_dtype >= 0 && a.output_dtype <= 16 && is_float(static_cast<DataType>(a.output_dtype));
  if (a.output_dtype != 0 && !valid_output)
    fail(a.op, ": output_dtype must be 0 or the number of ", kFloatNumbers, ", but got ", a.output_dtype, ".");

  const bool bytes = t == DataType::kUInt8 || t == DataType::kInt8;
  const CodeType* code = a.x_dtype == 0 ? own : find_code_type(a.x_dtype);
  if (bytes && (!code || code->bits > 8))
    fail(a.op, ": x_dtype must be 0 or the number of a type of at most 8 bits where x is ", name_of(a.x), ", but got ",
         a.x_dtype, ".");
  if (floating && !code)
    fail(a.op, ": x_dtype must be the number of ", kCodeNumbers, " where x is ", name_of(a.x), ", but got ", a.x_dtype,
         ".");
  if (!bytes && !floating && code != own)
    fail(a.op, ": x_dtype must be 0 or ", number(t), " (", name_of(a.x), ", the type of x), but got ", a.x_dtype, ".");
  check_zero_point_type(a.op, *code, a.zero_point);

  DequantizeSpec s{};
  s.code = code;
  s.x = t;
  s.floating = floating;
  s.scale = type_of(a.scale);
  s.output = a.output_dtype != 0                ? static_cast<DataType>(a.output_dtype)
             : s.scale == DataType::kFloat8E8M0 ? DataType::kFloat32
                                                : s.scale;
  s.packed = a.packed_size.has_value();
  if (s.packed && !code->sub_byte())
    fail(a.op, ": packed_size must be left out for ", code->name, " codes, but got ", *a.packed_size,
         ". Only 4-bit and 2-bit codes are packed.");
  s.sizes = s.packed ? check_packed_size(a.op, a.x, 8 / code->bits, *a.packed_size) : sizes_of(a.x);
  return s;
}

namespace {
const CodeType* check_sub_byte(const char* op, int64_t x_dtype) {
  const CodeType* code = find_code_type(x_dtype);
  if (!code || !code->sub_byte())
    fail(op,
         ": x_dtype must be the number of uint4 (21), int4 (22), float4_e2m1 (23), uint2 (25) or int2 (26), but got ",
         x_dtype, ".");
  return code;
}
}  // namespace

const CodeType* check_pack(const char* op, const Tensor& x, int64_t x_dtype) {
  const DataType t = type_of(x);
  if (t != DataType::kUInt8 && t != DataType::kInt8) fail(op, ": x must be uint8 or int8, but got ", name_of(x), ".");
  const CodeType* code = check_sub_byte(op, x_dtype);
  if (x.dim() == 0) fail(op, ": x must have at least one dimension to be packed, but got a 0-d tensor.");
  return code;
}

const CodeType* check_unpack(const char* op, const Tensor& x, int64_t x_dtype, std::optional<int64_t> packed_size,
                             Sizes& sizes) {
  const CodeType* code = check_sub_byte(op, x_dtype);
  const int per_byte = 8 / code->bits;
  int64_t all = 0;
  if (x.dim() > 0 && __builtin_mul_overflow(x.size(x.dim() - 1), per_byte, &all))
    fail(op, ": x must not hold more codes than int64 counts, but got shape ", Shape{sizes_of(x)}, ".");
  sizes = check_packed_size(op, x, per_byte, packed_size.value_or(all));
  return code;
}

Granularity resolve_granularity(const char* op, const Sizes& x_sizes, const Tensor& scale,
                                const std::optional<Tensor>& zero_point, int64_t axis, const Sizes& block_size) {
  const size_t rank = x_sizes.size();
  const Sizes scale_sizes = sizes_of(scale);
  check_block_size(op, x_sizes, block_size);
  Granularity g;
  const bool nd = block_size.size() > 1;
  if (nd || block_size[0] > 0) {
    const int64_t a = nd ? 0 : check_axis(op, x_sizes, axis);
    Sizes counts;
    g = blocked(x_sizes, a, block_size, counts);
    if (scale_sizes != counts)
      fail(op, ": scale must have shape ", Shape{counts}, " for block_size ", Shape{block_size}, ", but got shape ",
           Shape{scale_sizes}, ".");
  } else if (scale.numel() == 1) {
    g = per_tensor(x_sizes);
  } else if (scale_sizes.size() == 1 && rank > 0) {
    const int64_t a = check_axis(op, x_sizes, axis);
    if (scale_sizes[0] != x_sizes[a]) fail_per_axis(op, x_sizes, scale_sizes, axis, a);
    g = per_axis(x_sizes, a);
  } else if (scale_sizes.size() == rank) {
    g = per_tensor(x_sizes);
    const Sizes strides = contiguous_strides(scale_sizes);
    for (size_t d = 0; d < rank; ++d) {
      if (scale_sizes[d] != 1 && scale_sizes[d] != x_sizes[d])
        fail(op, ": scale must have size 1 or ", x_sizes[d], " in dimension ", d, " of x's shape ", Shape{x_sizes},
             ", but got shape ", Shape{scale_sizes}, ".");
      if (scale_sizes[d] != 1) g.block[d] = 1, g.stride[d] = strides[d];
    }
  } else {
    fail(op, ": scale must have one element, one dimension or the ", rank, " dimensions of x, but got shape ",
         Shape{scale_sizes}, ".");
  }
  // ONNX gives a scalar scale and a zero point of one element, or the other way round.
  const bool one_each = scale.numel() == 1 && zero_point && zero_point->numel() == 1;
  if (zero_point && !one_each && sizes_of(*zero_point) != scale_sizes)
    fail(op, ": zero_point must have scale's shape ", Shape{scale_sizes}, ", but got shape ",
         Shape{sizes_of(*zero_point)}, ".");
  return g;
}

Granularity resolve_reduction(const char* op, const Sizes& x_sizes, std::optional<int64_t> axis,
                              const Sizes& block_size, Sizes& result_sizes) {
  check_block_size(op, x_sizes, block_size);
  const bool nd = block_size.size() > 1;
  if (!nd && block_size[0] > 0 && !axis)
    fail(op, ": axis must be given with block_size ", block_size[0], ", but got None.");
  if (nd || block_size[0] > 0) {
    const int64_t a = nd ? 0 : check_axis(op, x_sizes, *axis);
    return blocked(x_sizes, a, block_size, result_sizes);
  }
  if (!axis) {
    result_sizes = Sizes();
    return per_tensor(x_sizes);
  }
  const int64_t a = check_axis(op, x_sizes, *axis);
  result_sizes = {x_sizes[a]};
  return per_axis(x_sizes, a);
}

ScaleMap make_map(const char* op, const Sizes& sizes, const Sizes& x_strides, const Sizes& y_strides,
                  const Granularity& g, bool x_packed) {
  std::array<size_t, kMaxDimensions> order;
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(sizes.size());
  std::iota(order.begin(), end, 0);
  std::sort(order.begin(), end,
            [&](size_t a, size_t b) { return y_strides[a] != y_strides[b] ? y_strides[a] > y_strides[b] : a < b; });
  ScaleMap map;
  bool fits = true;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t d = order[i];
    fits &= map.push({sizes[d], g.block[d], x_strides[d], y_strides[d], g.stride[d]});
  }
  // Without loops, or where packed rows hold one code each, a row is one element.
  const Loop* inner = map.count > 0 ? &map.loop[map.count - 1] : nullptr;
  if (!inner || inner->y_stride != 1 || (x_packed && inner->x_stride != 1)) {
    fits &= map.count < kMaxLoops;
    if (fits) map.loop[map.count++] = {1, 1, 1, 1, 0};
  }
  if (!fits) fail(op, ": x must not need more than ", kMaxLoops, " nested loops, but got shape ", Shape{sizes}, ".");
  return map;
}

namespace {
void check_out(const char* op, const char* name, const Tensor& on, const Sizes& sizes, DataType type,
               const Tensor& out) {
  check_device(op, name, on, out);
  if (sizes_of(out) != sizes)
    fail(op, ": ", name, " must have shape ", Shape{sizes}, ", but got shape ", Shape{sizes_of(out)}, ".");
  if (type_of(out) != type) fail(op, ": ", name, " must be ", name_of(type), ", but got ", name_of(out), ".");
  const Sizes strides = strides_of(out);
  for (size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] > 1 && strides[d] == 0)
      fail(op, ": ", name, " must not be expanded, but got stride 0 in dimension ", d, ".");
}
}  // namespace

Output Output::like(const char* op, const char* name, const Tensor& like, DataType type,
                    const std::optional<Tensor>& out) {
  const Sizes sizes = sizes_of(like);
  if (out) {
    check_out(op, name, like, sizes, type, *out);
    if (is_dense(sizes, strides_of(*out))) return {*out, out};
  }
  Sizes strides = strides_of(like);
  if (!like.is_contiguous() && !is_dense(sizes, strides)) strides = empty_like_strides(like);
  return {empty(sizes, strides, type, like), out};
}

Output Output::contiguous(const char* op, const char* name, const Tensor& device, const Sizes& sizes, DataType type,
                          const std::optional<Tensor>& out) {
  if (out) {
    check_out(op, name, device, sizes, type, *out);
    if (out->is_contiguous()) return {*out, out};
  }
  return {empty(sizes, contiguous_strides(sizes), type, device), out};
}

const Output& Output::apart_from(const char* op, const char* name, const Tensor& input, const char* input_name,
                                 bool same_allowed) const {
  if (!out_) return *this;
  const auto a = extent(*out_), b = extent(input);
  if (a.first >= b.second || b.first >= a.second) return *this;
  const bool same = a.first == b.first && type_of(*out_) == type_of(input) && strides_of(*out_) == strides_of(input);
  if (!(same && same_allowed)) fail(op, ": ", name, " must not overlap ", input_name, ", but they share memory.");
  return *this;
}

Tensor Output::finish() const {
  if (!out_) return tensor_;
  Tensor out = *out_;
  if (out.get() != tensor_.get()) torch::stable::copy_(out, tensor_);
  return out;
}

Granularity check_observe(const ObserveArguments& a) {
  check_input(a.op, a.x);
  Sizes sizes;
  const Granularity g = resolve_reduction(a.op, sizes_of(a.x), a.axis, a.block_size, sizes);
  struct State {
    const char* name;
    const Tensor* tensor;
  };
  State states[5];
  int count = 0;
  const auto check = [&](const char* name, const Tensor& t, const Sizes& want, DataType type) {
    check_out(a.op, name, a.x, want, type, t);
    if (!t.is_contiguous()) fail(a.op, ": ", name, " must be contiguous, but got strides ", Shape{strides_of(t)}, ".");
    states[count++] = {name, &t};
  };
  check("r_min", a.r_min, sizes, DataType::kFloat32);
  check("r_max", a.r_max, sizes, DataType::kFloat32);
  check("nonfinite", a.nonfinite, {}, DataType::kInt64);
  if (a.counts) {
    const Sizes got = sizes_of(*a.counts);
    const int64_t bins = got.empty() ? 0 : got[got.size() - 1];
    if (bins < kLeastBins || bins > kMostBins || (bins & (bins - 1)) != 0)
      fail(a.op, ": counts must have a power of two from ", kLeastBins, " to ", kMostBins,
           " bins in its last dimension, but got shape ", Shape{got}, ".");
    if (sizes.size() == kMaxDimensions)
      fail(a.op, ": x must have fewer than ", kMaxDimensions, " dimensions to be counted, but got ", sizes.size(), ".");
    Sizes want(sizes.size() + 1, bins);
    std::copy(sizes.begin(), sizes.end(), want.begin());
    check("counts", *a.counts, want, DataType::kInt64);
  }
  states[count++] = {"x", &a.x};
  for (int i = 0; i < count; ++i) {
    for (int j = i + 1; j < count; ++j) {
      const auto one = extent(*states[i].tensor), other = extent(*states[j].tensor);
      if (one.first < other.second && other.first < one.second)
        fail(a.op, ": ", states[i].name, " must not overlap ", states[j].name, ", but they share memory.");
    }
  }
  return g;
}

}  // namespace linquant
