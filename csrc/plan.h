// From an op's arguments to what a kernel needs: every check, the ScaleMap, the outputs. Serves every device.
//
// Errors are std::runtime_error with one sentence, `<op>: <argument> must <what holds>, but got <value>.`, thrown
// before any memory is touched. torch_linquant/_fake.py says the same sentences for fake tensors; tests/test_errors.py
// holds both to one table.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/formats.h"
#include "core/scale_map.h"

namespace linquant {

using torch::stable::Tensor;

inline constexpr size_t kMaxDimensions = 64;
inline constexpr int64_t kLeastBins = 1 << 12, kMostBins = 1 << 16;  // of a histogram

// Sizes or strides, one a dimension. Of fixed capacity: a call on a small tensor has no time for a heap.
class Sizes {
 public:
  Sizes() = default;
  explicit Sizes(size_t n, int64_t value = 0) : size_(checked(n)) { std::fill(begin(), end(), value); }
  template <class Iterator>
  Sizes(Iterator first, Iterator last) : size_(checked(static_cast<size_t>(last - first))) {
    std::copy(first, last, begin());
  }
  Sizes(std::initializer_list<int64_t> list) : Sizes(list.begin(), list.end()) {}
  Sizes(const std::vector<int64_t>& v) : Sizes(v.begin(), v.end()) {}
  Sizes(const Sizes& o) : Sizes(o.begin(), o.end()) {}
  Sizes& operator=(const Sizes& o) {
    size_ = o.size_;
    std::copy(o.begin(), o.end(), begin());
    return *this;
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  int64_t* begin() { return values_; }
  int64_t* end() { return values_ + size_; }
  const int64_t* begin() const { return values_; }
  const int64_t* end() const { return values_ + size_; }
  const int64_t* data() const { return values_; }
  int64_t& operator[](size_t d) { return values_[d]; }
  int64_t operator[](size_t d) const { return values_[d]; }
  int64_t& back() { return values_[size_ - 1]; }
  bool operator==(const Sizes& o) const { return std::equal(begin(), end(), o.begin(), o.end()); }

 private:
  static size_t checked(size_t n);
  size_t size_ = 0;
  int64_t values_[kMaxDimensions];
};

// The type of a tensor; kNone for a type this package has no use for.
DataType type_of(const Tensor& t);

// What quantize_linear and fake_quantize_linear were asked to compute, checked.
struct QuantizeSpec {
  const CodeType* code;
  FloatFormat format;  // of float codes, with `saturate` applied
  int64_t qmin, qmax;  // of integer codes
  Arithmetic arithmetic;
  DataType x, scale;   // types
  DataType precision;  // P of the quotient
  bool wide;           // the division is done in double
};

struct QuantizeArguments {
  const char* op;
  const Tensor& x;
  const Tensor& scale;
  const std::optional<Tensor>& zero_point;
  int64_t axis;
  Sizes block_size;
  int64_t output_dtype;
  bool saturate;
  int64_t precision;
  std::optional<int64_t> quant_min, quant_max;
  const std::string& arithmetic;
  bool packed = false;
  bool float_codes = false;
};

QuantizeSpec check_quantize(const QuantizeArguments& a);

// The type of codes as numbers: x's where it holds all of them, else the next that does.
DataType float_code_type(const CodeType& code, DataType x);

// Whether `ste` is "identity" rather than "clipped".
bool check_ste(const char* op, const std::string& ste);

struct DequantizeSpec {
  const CodeType* code;
  DataType x;       // type
  bool floating;    // x holds codes as floating numbers
  DataType scale;   // type
  DataType output;  // type
  bool packed;
  Sizes sizes;  // of x unpacked
};

struct DequantizeArguments {
  const char* op;
  const Tensor& x;
  const Tensor& scale;
  const std::optional<Tensor>& zero_point;
  int64_t axis;
  Sizes block_size;
  int64_t output_dtype;
  int64_t x_dtype;
  std::optional<int64_t> packed_size;
};

DequantizeSpec check_dequantize(const DequantizeArguments& a);

// The incoming gradient of a result like `like`, of the given sizes.
void check_gradient(const char* op, const Tensor& grad, const Tensor& x, const Sizes& sizes);

bool is_float(DataType t);

// x of the ops that read values: a float type or int32.
void check_input(const char* op, const Tensor& x);

// The type of dynamic_quantize_linear's codes: integers of at most 16 bits.
const CodeType* check_dynamic_output(const char* op, int64_t output_dtype);

// The checks of pack and unpack: the type of the codes, and the unpacked sizes.
const CodeType* check_pack(const char* op, const Tensor& x, int64_t x_dtype);
const CodeType* check_unpack(const char* op, const Tensor& x, int64_t x_dtype, std::optional<int64_t> packed_size,
                             Sizes& sizes);

// Blocks and scale strides per dimension of x: which scale an element uses, before any layout.
struct Granularity {
  Sizes block, stride;
};

// Finds the granularity that scale's shape, axis and block_size say; checks zero_point's shape.
Granularity resolve_granularity(const char* op, const Sizes& x_sizes, const Tensor& scale,
                                const std::optional<Tensor>& zero_point, int64_t axis, const Sizes& block_size);

// The granularity of a reduction over x (min_max, dynamic_quantize_linear) and the shape of its results.
Granularity resolve_reduction(const char* op, const Sizes& x_sizes, std::optional<int64_t> axis,
                              const Sizes& block_size, Sizes& result_sizes);

struct ObserveArguments {
  const char* op;
  const Tensor& x;
  const Tensor &r_min, &r_max, &nonfinite;
  const std::optional<Tensor>& counts;
  std::optional<int64_t> axis;
  Sizes block_size;
};

// The granularity of observe_, once its state is found to be of the types and shapes that x asks for.
Granularity check_observe(const ObserveArguments& a);

// The loops of an elementwise op from x to y, strides as in Loop. The innermost one has stride 1 in y, and in x where x
// is packed.
ScaleMap make_map(const char* op, const Sizes& sizes, const Sizes& x_strides, const Sizes& y_strides,
                  const Granularity& g, bool x_packed = false);

// Row-major strides; for packed codes (`per_byte` of them in a byte) rows of the last dimension are padded to whole
// bytes.
Sizes contiguous_strides(const Sizes& sizes, int per_byte = 1);

Sizes sizes_of(const Tensor& t);
Sizes strides_of(const Tensor& t);

// Sizes of packed storage: the last dimension in bytes.
Sizes packed_sizes(const Sizes& sizes, int per_byte);

// A result: memory to write into, new or the caller's `out`. An `out` with gaps is filled from a dense one in finish().
class Output {
 public:
  // Laid out as torch.empty_like(like) would be.
  static Output like(const char* op, const char* name, const Tensor& like, DataType type,
                     const std::optional<Tensor>& out);
  // Row-major, on `device`'s device.
  static Output contiguous(const char* op, const char* name, const Tensor& device, const Sizes& sizes, DataType type,
                           const std::optional<Tensor>& out);

  // Refuses an `out` that shares memory with an input, unless it is exactly that input and `same_allowed`.
  const Output& apart_from(const char* op, const char* name, const Tensor& input, const char* input_name,
                           bool same_allowed = false) const;

  const Tensor& tensor() const { return tensor_; }
  Tensor finish() const;

 private:
  Output(Tensor tensor, const std::optional<Tensor>& out) : tensor_(std::move(tensor)), out_(out) {}

  Tensor tensor_;
  std::optional<Tensor> out_;
};

// `t` itself when row-major, else a row-major copy.
Tensor row_major(const Tensor& t);

// The storage type of unpacked codes.
DataType storage_type(const CodeType& code);

}  // namespace linquant
