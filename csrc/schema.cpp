// The schema of every op, in one place. The meaning of each argument is written down where users look for it: in the
// Python functions of the same names. Numbers for data types are those of ONNX's TensorProto.DataType.
//
// Kernels are registered beside their code: csrc/cpu/register.cpp for the CPU. Fake kernels live in Python, which has
// symbolic shapes.
#include <torch/csrc/stable/library.h>

#include <string>

namespace {

// An op and its .out overload have the same arguments; `outputs` is the declaration of the results to write into.
void def(torch::stable::detail::StableLibrary& m, const std::string& name, const std::string& arguments,
         const std::string& results, const std::string& outputs, const std::string& out_results) {
  m.def((name + "(" + arguments + ") -> " + results).c_str());
  m.def((name + ".out(" + arguments + ", " + outputs + ") -> " + out_results).c_str());
}

void def(torch::stable::detail::StableLibrary& m, const std::string& name, const std::string& arguments) {
  def(m, name, arguments, "Tensor", "Tensor(a!) out", "Tensor(a!)");
}

const std::string kQuantizeArguments =
    "Tensor x, Tensor scale, Tensor? zero_point=None, *, int axis=1, int[1] block_size=0, int output_dtype=0, "
    "bool saturate=True, int precision=0, int? quant_min=None, int? quant_max=None, str arithmetic=\"onnx\"";

}  // namespace

STABLE_TORCH_LIBRARY(linquant, m) {
  def(m, "quantize_linear", kQuantizeArguments + ", bool packed=False");
  // Codes as numbers of a floating type. An overload, since it has a gradient and the others need not ask for one.
  m.def(("quantize_linear.float_codes(" + kQuantizeArguments + ") -> Tensor").c_str());
  def(m, "fake_quantize_linear", kQuantizeArguments + ", str ste=\"clipped\"");
  def(m, "dequantize_linear",
      "Tensor x, Tensor scale, Tensor? zero_point=None, *, int axis=1, int[1] block_size=0, int output_dtype=0, "
      "int x_dtype=0, SymInt? packed_size=None");
  def(m, "dynamic_quantize_linear",
      "Tensor x, *, int? axis=None, int[1] block_size=0, int output_dtype=2, bool symmetric=False",
      "(Tensor y, Tensor scale, Tensor zero_point)", "Tensor(a!) y, Tensor(b!) scale, Tensor(c!) zero_point",
      "(Tensor(a!), Tensor(b!), Tensor(c!))");
  def(m, "min_max", "Tensor x, *, int? axis=None, int[1] block_size=0", "(Tensor r_min, Tensor r_max)",
      "Tensor(a!) r_min, Tensor(b!) r_max", "(Tensor(a!), Tensor(b!))");
  // Takes x into a running range, and into a histogram if there is one.
  m.def(
      "observe_(Tensor x, Tensor(a!) r_min, Tensor(b!) r_max, Tensor(c!) nonfinite, Tensor(d!)? counts=None, *, "
      "int? axis=None, int[1] block_size=0) -> ()");
  def(m, "pack", "Tensor x, *, int x_dtype");
  def(m, "unpack", "Tensor x, *, int x_dtype, SymInt? packed_size=None");

  // Gradients of x, scale and zero_point; a tensor without elements for one that is not needed.
  const std::string needs = "bool need_x, bool need_scale, bool need_zero_point) -> (Tensor, Tensor, Tensor)";
  const std::string quantize =
      "(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, int axis, int[1] block_size, int output_dtype, "
      "int precision, int? quant_min, int? quant_max, str arithmetic, ";
  m.def(("quantize_linear_backward" + quantize + needs).c_str());
  m.def(("fake_quantize_linear_backward" + quantize + "str ste, " + needs).c_str());
  m.def(("dequantize_linear_backward(Tensor grad, Tensor x, Tensor scale, Tensor? zero_point, int axis, "
         "int[1] block_size, int x_dtype, SymInt? packed_size, " +
         needs)
            .c_str());

  // For tests and benchmarks: asks (-1) or sets which CPU kernels run. 0 general, 1 baseline, 2 AVX2, 3 AVX-512.
  m.def("_cpu_variant(int variant=-1) -> int");
}
