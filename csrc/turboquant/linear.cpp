// SPDX-License-Identifier: Apache-2.0
//
// What the variants of linear.h share: packing, threads, and the embedding.
#include "linear.h"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "tdsf.h"

namespace tdsf {
namespace {

// Rows of input that stay in a core's second-level cache while panels stream past them.
constexpr int64_t kCachedInputs = 96 * 1024;

// Where panel column `column` lies in a 64-byte row, in 16-bit units.
int place(int column) { return column < 16 ? 2 * column : 2 * (column - 16) + 1; }

LinearPanel variant() {
#if defined(__x86_64__)
  const Kernels* chosen = &kernels();
  if (chosen == &kAvx512Vnni || chosen == &kAvx512) return kLinearAvx512;
  if (chosen == &kAvxVnni || chosen == &kAvx2) return kLinearAvx2;
#endif
  return kLinearPortable;
}

}  // namespace

bool pack_linear(const float* weight, int64_t row_stride, int64_t out, int64_t in,
                 uint16_t* panels) {
  const int64_t count = (out + kPanelColumns - 1) / kPanelColumns;
  std::atomic<bool> exact{true};
#pragma omp parallel for schedule(static)
  for (int64_t panel = 0; panel < count; panel++) {
    uint16_t* to = panels + panel * in * kPanelColumns;
    for (int column = 0; column < kPanelColumns; column++) {
      const int64_t row = panel * kPanelColumns + column;
      for (int64_t i = 0; i < in; i++) {
        uint32_t bits = 0;
        if (row < out) std::memcpy(&bits, weight + row * row_stride + i, 4);
        if (bits & 0xffffu) exact.store(false, std::memory_order_relaxed);
        to[i * kPanelColumns + place(column)] = static_cast<uint16_t>(bits >> 16);
      }
    }
  }
  return exact;
}

void linear(const LinearArgs& args) {
  const LinearPanel panel_rows = variant();
  const int64_t count = (args.out + kPanelColumns - 1) / kPanelColumns;
  const int64_t chunk = std::max<int64_t>(12, kCachedInputs / std::max<int64_t>(args.in, 1));
#pragma omp parallel
  {
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t begin = count * me / threads, end = count * (me + 1) / threads;
    for (int64_t first = 0; first < args.rows; first += chunk)
      for (int64_t panel = begin; panel < end; panel++)
        panel_rows(args, panel, first, std::min(first + chunk, args.rows));
  }
}

void embed(const int64_t* ids, int64_t count, const uint16_t* panels, int64_t in, int64_t out,
           float* y) {
  for (int64_t n = 0; n < count; n++) {
    if (ids[n] < 0 || ids[n] >= out)
      throw std::invalid_argument("embedding id " + std::to_string(ids[n]) + " is outside [0, " +
                                  std::to_string(out) + ")");
    const uint16_t* from = panels + ids[n] / kPanelColumns * in * kPanelColumns +
                           place(static_cast<int>(ids[n] % kPanelColumns));
    for (int64_t i = 0; i < in; i++) {
      const uint32_t bits = static_cast<uint32_t>(from[i * kPanelColumns]) << 16;
      std::memcpy(y + n * in + i, &bits, 4);
    }
  }
}

}  // namespace tdsf
