// SPDX-License-Identifier: Apache-2.0
//
// torch.ops.tdsf.{store, attend, isa, variants}: tensors checked and taken apart, nothing else.
// Built against torch's stable ABI, so one binary serves many torch releases.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

#include "tdsf.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

void require(bool holds, const std::string& what) {
  if (!holds) throw std::invalid_argument("tdsf: " + what);
}

void require_shape(const Tensor& t, const char* name, ScalarType type,
                   std::initializer_list<int64_t> shape) {
  bool fits = t.is_cpu() && t.scalar_type() == type && t.dim() == (int64_t)shape.size();
  int64_t i = 0;
  std::string wanted;
  for (const int64_t size : shape) {
    fits = fits && t.size(i++) == size;
    wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  }
  require(fits, std::string(name) + " must be a CPU tensor of its documented dtype and shape [" +
                    wanted + "]");
}

template <class T>
const T* contiguous(const Tensor& t, const char* name, ScalarType type,
                    std::initializer_list<int64_t> shape) {
  require_shape(t, name, type, shape);
  require(t.is_contiguous(), std::string(name) + " must be contiguous");
  return static_cast<const T*>(t.data_ptr());
}

tdsf::Activations activations(const Tensor& t, const char* name, int64_t tokens, int64_t heads,
                              int64_t dim) {
  require_shape(t, name, t.scalar_type(), {tokens, heads, dim});
  tdsf::Dtype dtype = tdsf::Dtype::kFloat32;
  switch (t.scalar_type()) {
    case ScalarType::Float: break;
    case ScalarType::BFloat16: dtype = tdsf::Dtype::kBFloat16; break;
    case ScalarType::Half: dtype = tdsf::Dtype::kFloat16; break;
    default: require(false, std::string(name) + " must be float32, bfloat16 or float16");
  }
  require(t.stride(2) == 1, std::string(name) + " must be contiguous in its last dimension");
  return {t.data_ptr(), dtype, t.stride(0), t.stride(1)};
}

// [heads, dim, dim], each matrix dense; heads may share one (stride 0). LayerConstants lays them
// out: those that multiply column after column, feedback row after row.
tdsf::Matrices matrices(const Tensor& t, const char* name, int64_t heads, int64_t dim,
                        bool by_columns) {
  require_shape(t, name, ScalarType::Float, {heads, dim, dim});
  const int line = by_columns ? 2 : 1;
  require(t.stride(line) == dim && t.stride(3 - line) == 1,
          std::string(name) + (by_columns ? " must lie column after column"
                                          : " must lie row after row"));
  return {static_cast<const float*>(t.data_ptr()), t.stride(0)};
}

tdsf::Matrices optional_matrices(const Maybe& t, const char* name, int64_t heads,
                                 int64_t dim) {
  return t ? matrices(*t, name, heads, dim, false) : tdsf::Matrices{};
}

void set_waves(tdsf::Waves& w, int64_t heads, int64_t dim, const Maybe& table, const Maybe& rows,
               const Maybe& shapes) {
  if (!table) return;
  require(rows && shapes && table->dim() == 3 && rows->dim() == 1,
          "wave_table [positions / 32, rows, 32], wave_rows [count] and wave_shapes belong together");
  const int64_t count = rows->size(0), groups = table->size(0);
  require(count <= dim, "at most head_dim waves");
  w.table_rows = table->size(1);
  w.table = contiguous<float>(*table, "wave_table", ScalarType::Float,
                              {groups, w.table_rows, tdsf::kGroup});
  w.rows = contiguous<int32_t>(*rows, "wave_rows", ScalarType::Int, {count});
  w.shapes = contiguous<float>(*shapes, "wave_shapes", ScalarType::Float, {heads, count, dim});
  for (int64_t j = 0; j < count; j++)
    require(w.rows[j] >= 0 && w.rows[j] < w.table_rows, "wave_rows names a row beyond wave_table");
  w.count = (int)count;
  w.dim = (int)dim;
  w.length = groups * tdsf::kGroup;
}

void set_common(tdsf::Constants& c, int64_t heads, int64_t dim, int64_t key_bits,
                int64_t value_bits, const Tensor& key_center, const Tensor& numbers,
                const Tensor& key_levels, const Tensor& value_levels, const Tensor& scale_step) {
  const auto levels = [&](const Tensor& t, const char* name, int64_t bits) {
    return contiguous<int8_t>(t, name, ScalarType::Char,
                              {heads, dim / tdsf::kLevelGroup, bits == 8 ? 0 : 1 << bits});
  };
  const float* step = contiguous<float>(scale_step, "scale_step", ScalarType::Float, {2});
  c.heads = (int)heads;
  c.dim = (int)dim;
  c.key_center = contiguous<float>(key_center, "key_center", ScalarType::Float, {heads, dim});
  c.tdsf = contiguous<float>(numbers, "tdsf", ScalarType::Float, {heads, 6});
  c.key_levels = levels(key_levels, "key_levels", key_bits);
  c.value_levels = levels(value_levels, "value_levels", value_bits);
  c.key_step = step[0];
  c.value_step = step[1];
}

tdsf::Cache cache_of(const Tensor& t, int64_t heads, int64_t dim, int64_t key_bits,
                     int64_t value_bits) {
  const auto known = [](int64_t bits) { return bits == 3 || bits == 4 || bits == 8; };
  require(known(key_bits) && known(value_bits), "bits per coordinate must be 3, 4 or 8");
  require(dim >= 32 && dim <= tdsf::kMaxDim && dim % tdsf::kLevelGroup == 0,
          "head_dim must be a multiple of 16 from 32 to 256, not " + std::to_string(dim));
  require(t.is_cpu() && t.scalar_type() == ScalarType::Byte && t.dim() == 4 && t.size(1) == heads,
          "cache must be a uint8 CPU tensor [blocks, " + std::to_string(heads) +
              ", block tokens, content]");
  const int64_t tokens = t.size(2), content = t.size(3);
  require(tokens > 0 && tokens % tdsf::kGroup == 0, "a block must hold a multiple of 32 tokens");
  require(t.stride(3) == 1 && t.stride(2) == content,
          "each block and head of the cache must be contiguous");
  const tdsf::Layout layout =
      tdsf::make_layout((int)key_bits, (int)value_bits, (int)dim, (int)tokens);
  require(layout.end <= tokens * content,
          "a cache of " + std::to_string(content) + " bytes per token is too small for the format");
  return {static_cast<uint8_t*>(t.data_ptr()), t.stride(0), t.stride(1), t.size(0), layout};
}

void store(const Tensor& key, const Tensor& value, const Tensor& cache, const Tensor& slot_mapping,
           const Tensor& positions, const Tensor& key_center, const Tensor& key_in,
           const Maybe& key_feedback, const Tensor& value_in, const Maybe& value_feedback,
           const Tensor& numbers, const Tensor& key_levels, const Tensor& value_levels,
           const Tensor& scale_step, int64_t key_bits, int64_t value_bits,
           const Maybe& wave_table, const Maybe& wave_rows, const Maybe& wave_shapes) {
  require(key.dim() == 3, "key must have the shape [tokens, kv heads, head_dim]");
  const int64_t tokens = key.size(0), heads = key.size(1), dim = key.size(2);
  tdsf::StoreArgs args{};
  args.cache = cache_of(cache, heads, dim, key_bits, value_bits);
  args.key = activations(key, "key", tokens, heads, dim);
  args.value = activations(value, "value", tokens, heads, dim);
  args.tokens = tokens;
  args.slots = contiguous<int64_t>(slot_mapping, "slot_mapping", ScalarType::Long, {tokens});
  args.positions = contiguous<int64_t>(positions, "positions", ScalarType::Long, {tokens});
  set_common(args.constants, heads, dim, key_bits, value_bits, key_center, numbers, key_levels,
             value_levels, scale_step);
  tdsf::Constants& c = args.constants;
  c.key_in = matrices(key_in, "key_in", heads, dim, true);
  c.key_feedback = optional_matrices(key_feedback, "key_feedback", heads, dim);
  c.value_in = matrices(value_in, "value_in", heads, dim, true);
  c.value_feedback = optional_matrices(value_feedback, "value_feedback", heads, dim);
  set_waves(c.waves, heads, dim, wave_table, wave_rows, wave_shapes);
  tdsf::store(args);
}

void attend(const Tensor& query, const Tensor& cache, const Tensor& block_table,
            const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& out,
            const Tensor& key_center, const Tensor& query_in, const Tensor& value_out,
            const Tensor& numbers, const Tensor& key_levels, const Tensor& value_levels,
            const Tensor& scale_step, int64_t key_bits, int64_t value_bits, double scale,
            double softcap, int64_t window_left, Maybe sinks, const Maybe& wave_table,
            const Maybe& wave_rows, const Maybe& wave_shapes) {
  require(query.dim() == 3, "query must have the shape [tokens, heads, head_dim]");
  require(key_center.dim() == 2, "key_center must have the shape [kv heads, head_dim]");
  const int64_t tokens = query.size(0), query_heads = query.size(1), dim = query.size(2);
  const int64_t heads = key_center.size(0), requests = seq_lens.size(0);
  require(heads > 0 && query_heads % heads == 0 && query_heads / heads <= tdsf::kMaxGroup,
          "query heads must be 1 to 16 times the kv heads, not " + std::to_string(query_heads) +
              " for " + std::to_string(heads));
  tdsf::AttendArgs args{};
  args.cache = cache_of(cache, heads, dim, key_bits, value_bits);
  args.query = activations(query, "query", tokens, query_heads, dim);
  args.out = activations(out, "out", tokens, query_heads, dim);
  args.group = (int)(query_heads / heads);
  args.requests = (int)requests;
  args.tokens = tokens;
  require(block_table.dim() == 2 && block_table.stride(1) == 1,
          "block_table must be [requests, blocks], contiguous in its last dimension");
  require_shape(block_table, "block_table", ScalarType::Int, {requests, block_table.size(1)});
  args.block_table = static_cast<const int32_t*>(block_table.data_ptr());
  args.table_stride = block_table.stride(0);
  args.table_width = block_table.size(1);
  args.query_starts = contiguous<int32_t>(query_start_loc, "query_start_loc", ScalarType::Int,
                                          {requests + 1});
  args.seq_lens = contiguous<int32_t>(seq_lens, "seq_lens", ScalarType::Int, {requests});
  args.scale = (float)scale;
  args.softcap = (float)softcap;
  args.window_left = (int)window_left;
  if (sinks)
    args.sinks = contiguous<float>(*sinks, "sinks", ScalarType::Float, {query_heads});
  set_common(args.constants, heads, dim, key_bits, value_bits, key_center, numbers, key_levels,
             value_levels, scale_step);
  set_waves(args.constants.waves, heads, dim, wave_table, wave_rows, wave_shapes);
  args.constants.query_in = matrices(query_in, "query_in", heads, dim, true);
  args.constants.value_out = matrices(value_out, "value_out", heads, dim, true);
  tdsf::attend(args);
}

std::string isa() { return tdsf::kernels().name; }

std::string variants() { return tdsf::variants(); }

}  // namespace

STABLE_TORCH_LIBRARY(tdsf, m) {
  m.def(
      "store(Tensor key, Tensor value, Tensor(a!) cache, Tensor slot_mapping, Tensor positions, "
      "Tensor key_center, Tensor key_in, Tensor? key_feedback, "
      "Tensor value_in, Tensor? value_feedback, Tensor tdsf, "
      "Tensor key_levels, Tensor value_levels, Tensor scale_step, int key_bits, int value_bits, "
      "Tensor? wave_table=None, Tensor? wave_rows=None, Tensor? wave_shapes=None) -> ()");
  m.def(
      "attend(Tensor query, Tensor cache, Tensor block_table, Tensor query_start_loc, "
      "Tensor seq_lens, Tensor(a!) out, Tensor key_center, Tensor query_in, Tensor value_out, "
      "Tensor tdsf, Tensor key_levels, Tensor value_levels, Tensor scale_step, int key_bits, "
      "int value_bits, float scale, float softcap, int window_left, Tensor? sinks, "
      "Tensor? wave_table=None, Tensor? wave_rows=None, Tensor? wave_shapes=None) -> ()");
  m.def("isa() -> str");
  m.def("variants() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(tdsf, CPU, m) {
  m.impl("store", TORCH_BOX(&store));
  m.impl("attend", TORCH_BOX(&attend));
}

STABLE_TORCH_LIBRARY_IMPL(tdsf, CompositeExplicitAutograd, m) {
  m.impl("isa", TORCH_BOX(&isa));
  m.impl("variants", TORCH_BOX(&variants));
}
