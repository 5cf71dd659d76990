// SPDX-License-Identifier: Apache-2.0
//
// torch.ops.tdsf.{pack_linear, linear, embed} over linear.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "linear.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(std::string("tdsf: ") + what);
}

const uint16_t* panels_of(const Tensor& panels) {
  require(panels.is_cpu() && panels.scalar_type() == ScalarType::Short && panels.dim() == 3 &&
              panels.size(2) == tdsf::kPanelColumns && panels.is_contiguous(),
          "panels must be what pack_linear returned");
  return static_cast<const uint16_t*>(panels.data_ptr());
}

void require_rows(const Tensor& x, const char* what) {
  require(x.is_cpu() && x.scalar_type() == ScalarType::Float && x.dim() == 2 && x.stride(1) == 1,
          what);
}

bool pack_linear(const Tensor& weight, const Tensor& panels) {
  require_rows(weight, "weight must be float32 [out, in]");
  panels_of(panels);
  require(panels.size(0) == (weight.size(0) + tdsf::kPanelColumns - 1) / tdsf::kPanelColumns &&
              panels.size(1) == weight.size(1),
          "panels must be int16 [ceil(out / 32), in, 32]");
  return tdsf::pack_linear(static_cast<const float*>(weight.data_ptr()), weight.stride(0),
                           weight.size(0), weight.size(1),
                           static_cast<uint16_t*>(panels.data_ptr()));
}

Tensor linear(const Tensor& x, const Tensor& panels, int64_t out, std::optional<Tensor> bias) {
  require_rows(x, "x must be float32 [rows, in], contiguous in its last dimension");
  tdsf::LinearArgs args{};
  args.panels = panels_of(panels);
  require(panels.size(1) == x.size(1), "x must have as many columns as the weight has inputs");
  require(out > (panels.size(0) - 1) * tdsf::kPanelColumns &&
              out <= panels.size(0) * tdsf::kPanelColumns,
          "out must be the number of outputs that were packed");
  if (bias) {
    require(bias->is_cpu() && bias->scalar_type() == ScalarType::Float && bias->is_contiguous() &&
                bias->dim() == 1 && bias->size(0) == out,
            "bias must be float32 [out]");
    args.bias = static_cast<const float*>(bias->data_ptr());
  }
  Tensor y = torch::stable::new_empty(x, {x.size(0), out});
  args.x = static_cast<const float*>(x.data_ptr());
  args.rows = x.size(0);
  args.x_stride = x.stride(0);
  args.in = x.size(1);
  args.out = out;
  args.y = static_cast<float*>(y.data_ptr());
  args.y_stride = out;
  tdsf::linear(args);
  return y;
}

Tensor embed(const Tensor& ids, const Tensor& panels, int64_t out) {
  require(ids.is_cpu() && ids.scalar_type() == ScalarType::Long && ids.dim() == 1 &&
              ids.is_contiguous(),
          "ids must be int64 [tokens]");
  const uint16_t* from = panels_of(panels);
  Tensor y = torch::stable::new_empty(ids, {ids.size(0), panels.size(1)}, ScalarType::Float);
  tdsf::embed(static_cast<const int64_t*>(ids.data_ptr()), ids.size(0), from, panels.size(1), out,
              static_cast<float*>(y.data_ptr()));
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(tdsf, m) {
  m.def("pack_linear(Tensor weight, Tensor(a!) panels) -> bool");
  m.def("linear(Tensor x, Tensor panels, int out, Tensor? bias) -> Tensor");
  m.def("embed(Tensor ids, Tensor panels, int out) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tdsf, CPU, m) {
  m.impl("pack_linear", TORCH_BOX(&pack_linear));
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("embed", TORCH_BOX(&embed));
}
