// Runs a model that AOTInductor compiled, without Python: run LIBRARY MODEL.pt2 ROWS COLUMNS
//
// Reads a float32 input of ROWS x COLUMNS from standard input, raw, and writes the first output to standard output.
// The ops' library is loaded first: the package only names what it calls. examples/cpp/README.md has the build.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

namespace {

int fail(const std::string& what) {
  std::fprintf(stderr, "run: %s\n", what.c_str());
  return 1;
}

torch::Tensor read_input(int64_t rows, int64_t columns) {
  torch::Tensor x = torch::empty({rows, columns});
  const size_t want = static_cast<size_t>(x.numel());
  if (std::fread(x.data_ptr<float>(), sizeof(float), want, stdin) != want)
    throw std::runtime_error("standard input must hold " + std::to_string(want) + " float32 numbers");
  return x;
}

void write_output(const torch::Tensor& y) {
  const torch::Tensor plain = y.contiguous();
  std::fwrite(plain.data_ptr(), plain.element_size(), static_cast<size_t>(plain.numel()), stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return fail("usage: run LIBRARY MODEL.pt2 ROWS COLUMNS < input > output");
  if (!dlopen(argv[1], RTLD_NOW | RTLD_LOCAL)) return fail(dlerror());
  try {
    const torch::NoGradGuard no_gradients;
    torch::inductor::AOTIModelPackageLoader model(argv[2]);
    write_output(model.run({read_input(std::atoll(argv[3]), std::atoll(argv[4]))}).at(0));
  } catch (const std::exception& error) {
    return fail(error.what());
  }
  return 0;
}
