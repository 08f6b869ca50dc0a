// Which row kernels run: chosen once by what the CPU has and by ATEN_CPU_CAPABILITY, as PyTorch's own kernels are. The
// op linquant::_cpu_variant changes it, for tests and benchmarks.
#include <torch/csrc/stable/library.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/engines.h"

namespace linquant::cpu {
namespace {

enum Variant : int64_t { kExact, kBase, kAvx2, kAvx512 };

bool has(int64_t variant) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (variant == kAvx512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (variant == kAvx2) return avx2;
#endif
  return variant == kExact || variant == kBase;
}

int64_t best() {
  const char* value = std::getenv("ATEN_CPU_CAPABILITY");
  const std::string limit = value ? value : "";
  if (limit == "default") return kBase;
  if (limit != "avx2" && has(kAvx512)) return kAvx512;
  return has(kAvx2) ? kAvx2 : kBase;
}

std::atomic<int64_t>& current() {
  static std::atomic<int64_t> variant{best()};
  return variant;
}

int64_t cpu_variant(int64_t variant) {
  if (variant != -1) {
    if (!has(variant))
      throw std::runtime_error(
          "_cpu_variant: variant must be 0 (exact), 1 (baseline), 2 (AVX2) or 3 (AVX-512) and one "
          "that this CPU has, but got " +
          std::to_string(variant) + ".");
    current() = variant;
  }
  return current();
}

}  // namespace

const Kernels* active_kernels() {
  switch (current().load(std::memory_order_relaxed)) {
    case kBase:
      return &kBaseKernels;
#if defined(__x86_64__)
    case kAvx2:
      return &kAvx2Kernels;
    case kAvx512:
      return &kAvx512Kernels;
#endif
    default:
      return nullptr;
  }
}

}  // namespace linquant::cpu

STABLE_TORCH_LIBRARY_IMPL(linquant, CompositeExplicitAutograd, m) {
  m.impl("_cpu_variant", TORCH_BOX(&linquant::cpu::cpu_variant));
}
