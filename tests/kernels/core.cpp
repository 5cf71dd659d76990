// SPDX-License-Identifier: Apache-2.0
//
// Runs the kernel core on random cases, `core ROUNDS`, and prints the variant in use and a digest of
// all that was written. Every buffer has its exact size, so that sanitizers see one byte too far.
// The cases are the same on every machine: integers drawn, no library's logarithm.
#include <omp.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "linear.h"
#include "tdsf.h"

namespace {

std::mt19937 source(1);

int draw(int low, int high) { return low + (int)(source() % (uint32_t)(high - low + 1)); }

template <class T>
T choose(std::initializer_list<T> choices) {
  return choices.begin()[draw(0, (int)choices.size() - 1)];
}

// Sums of four uniform numbers of 16 bits, nearly normal, of standard deviation `spread`.
std::vector<float> normals(size_t count, float spread) {
  std::vector<float> v(count);
  for (float& x : v) {
    const uint32_t a = (uint32_t)source(), b = (uint32_t)source();
    const uint32_t sum = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
    x = (float)((int)sum - 2 * 65535) * (spread / 37837.0f);
  }
  return v;
}

std::vector<int8_t> tables(int rows, int bits) {
  std::vector<int8_t> v;
  for (int r = 0; bits < 8 && r < rows; r++)
    for (int k = 0; k < 1 << bits; k++)
      v.push_back((int8_t)(-120 + 240 * k / ((1 << bits) - 1) + draw(-5, 5)));
  return v;
}

uint64_t digest = 1469598103934665603u;

void absorb(const void* data, size_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < bytes; i++) digest = (digest ^ p[i]) * 1099511628211u;
}

void run_case(int key_bits, int value_bits) {
  const int dim = choose({32, 64, 80, 96, 112, 128, 160, 192, 224, 256});
  const int heads = draw(1, 2), group = choose({1, 2, 3, 6, 7, 16});
  const int block_tokens = choose({32, 64, 96, 128}), length = draw(1, choose({40, 700}));
  const int rows = draw(1, std::min(length, choose({1, 40})));
  const int blocks = (length + block_tokens - 1) / block_tokens;
  const tdsf::Layout at = tdsf::make_layout(key_bits, value_bits, dim, block_tokens);
  std::vector<uint8_t> cache((size_t)blocks * heads * at.end);
  for (uint8_t& byte : cache) byte = (uint8_t)draw(0, 255);

  const size_t matrix = (size_t)heads * dim * dim;
  const float spread = 1.0f / std::sqrt((float)dim);
  const auto center = normals(heads * dim, 1), key_in = normals(matrix, spread),
             query_in = normals(matrix, spread), value_in = normals(matrix, spread),
             value_out = normals(matrix, spread);
  std::vector<float> numbers;
  for (int h = 0; h < heads; h++) numbers.insert(numbers.end(), {0.1f, 0.3f, 0.02f, 0, 0, 0.02f});
  const auto key_levels = tables(heads * dim / 16, key_bits);
  const auto value_levels = tables(heads * dim / 16, value_bits);
  // Half of the cases round each coordinate by itself, half pass errors on.
  std::vector<float> feedback(matrix);
  const bool passes_on = draw(0, 1);
  for (int h = 0; h < heads; h++)
    for (int i = 0; i < dim; i++)
      for (int j = i; j < dim; j++) {
        const float x = i == j ? 1.0f : passes_on ? normals(1, 0.05f)[0] : 0.0f;
        const size_t at_head = (size_t)h * dim * dim;
        feedback[at_head + (size_t)i * dim + j] = x;
      }
  const auto matrices = [&](const std::vector<float>& v) {
    return tdsf::Matrices{v.data(), (int64_t)dim * dim};
  };
  tdsf::Constants constants{};
  constants.heads = heads;
  constants.dim = dim;
  constants.key_center = center.data();
  constants.key_in = matrices(key_in);
  constants.query_in = matrices(query_in);
  constants.value_in = matrices(value_in);
  constants.value_out = matrices(value_out);
  constants.key_feedback = constants.value_feedback = matrices(feedback);
  constants.tdsf = numbers.data();
  constants.key_levels = key_levels.data();
  constants.value_levels = value_levels.data();
  constants.key_step = constants.value_step = choose({0.125f, 0.0f});
  // Half of the cases have a key bias.
  const bool has_bias = draw(0, 1);
  const int count = has_bias ? draw(1, dim) : 0, reach = (length + 31) / 32 * 32;
  const auto waves = normals((size_t)dim * reach, 1), shapes = normals((size_t)heads * count * dim, 1);
  std::vector<int32_t> wave_rows(count);
  for (int32_t& row : wave_rows) row = draw(0, dim - 1);
  constants.waves = {waves.data(), wave_rows.data(), shapes.data(), count, dim, dim, reach};
  const tdsf::Cache pages{cache.data(), heads * at.end, at.end, blocks, at};

  auto key = normals((size_t)length * heads * dim, 2);
  auto value = normals((size_t)length * heads * dim, 2);
  if (draw(0, 3) == 0) key[draw(0, (int)key.size() - 1)] = NAN;
  std::vector<int32_t> table(blocks);
  for (int b = 0; b < blocks; b++) table[b] = blocks - 1 - b;
  std::vector<int64_t> slots(length), positions(length);
  for (int t = 0; t < length; t++) {
    positions[t] = t;
    slots[t] = (int64_t)table[t / block_tokens] * block_tokens + t % block_tokens;
  }
  const auto flat = [&](std::vector<float>& v, int n) {
    return tdsf::Activations{v.data(), tdsf::Dtype::kFloat32, (int64_t)n * dim, dim};
  };
  tdsf::store({flat(key, heads), flat(value, heads), length, pages, slots.data(), positions.data(),
               constants});
  absorb(cache.data(), cache.size());

  auto query = normals((size_t)rows * heads * group * dim, 1);
  if (draw(0, 3) == 0) query[draw(0, (int)query.size() - 1)] = INFINITY;
  std::vector<float> out(query.size());
  const auto sinks = normals(heads * group, 1);
  const std::vector<int32_t> starts = {0, rows}, lengths = {length};
  tdsf::AttendArgs args{};
  args.query = flat(query, heads * group);
  args.out = flat(out, heads * group);
  args.group = group;
  args.requests = 1;
  args.cache = pages;
  args.block_table = table.data();
  args.table_stride = args.table_width = blocks;
  args.query_starts = starts.data();
  args.seq_lens = lengths.data();
  args.tokens = rows;
  args.scale = spread;
  args.softcap = choose({0.0f, 5.0f});
  args.window_left = choose({-1, 0, 50});
  args.sinks = draw(0, 1) ? sinks.data() : nullptr;
  args.constants = constants;
  tdsf::attend(args);
  absorb(out.data(), out.size() * sizeof(float));
}

void run_linear() {
  const int64_t in = draw(1, 200), out = draw(1, 100), rows = draw(1, 40);
  auto weight = normals(out * in, 1);
  for (float& x : weight) {  // to bf16
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits &= 0xffff0000u;
    std::memcpy(&x, &bits, 4);
  }
  std::vector<uint16_t> panels((out + 31) / 32 * in * 32);
  if (!tdsf::pack_linear(weight.data(), in, out, in, panels.data())) std::abort();
  const auto x = normals(rows * in, 1), bias = normals(out, 1);
  std::vector<float> y(rows * out), embedded(in);
  tdsf::linear({x.data(), rows, in, panels.data(), in, out, draw(0, 1) ? bias.data() : nullptr,
                y.data(), out});
  const int64_t id = draw(0, (int)out - 1);
  tdsf::embed(&id, 1, panels.data(), in, out, embedded.data());
  if (std::memcmp(embedded.data(), weight.data() + id * in, in * sizeof(float))) std::abort();
  absorb(y.data(), y.size() * sizeof(float));
}

}  // namespace

int main(int, char** arguments) {
  omp_set_num_threads(2);
  for (int round = 0; round < std::atoi(arguments[1]); round++) {
    for (const int key_bits : {3, 4, 8})
      for (const int value_bits : {3, 4, 8}) run_case(key_bits, value_bits);
    run_linear();
  }
  std::printf("%s %016llx\n", tdsf::kernels().name, (unsigned long long)digest);
}
