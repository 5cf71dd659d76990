// SPDX-License-Identifier: Apache-2.0
//
// The kernel core's interface: plain C++, no torch. docs/format.md describes the bytes.
//
// Three layers:
//   engine.cpp    checks arguments, cuts the work into tiles, spreads tiles over threads
//   VARIANT.cpp   one instruction set each: the Kernels table below, built from store.h,
//                 attend.h and the variant's own integer dot products
//   binding.cpp   torch tensors in, these structs out
//
// One arithmetic. Every variant performs the same operations in the same order: integer sums are
// exact, floating-point steps are elementwise or 16 strided partial sums folded in one fixed tree,
// products and sums are rounded separately (no fused multiply-add). So all variants give equal
// bits, and a query row's bits depend on its query, its position and its sequence alone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace tdsf {

constexpr int kMaxDim = 256;     // largest head_dim
constexpr int kMaxGroup = 16;    // largest number of query heads per kv head
constexpr int kGroup = 32;       // tokens whose packed planes share bytes; blocks are multiples
constexpr int kPiece = 512;      // tokens of a sequence that share one softmax maximum
constexpr int kTileRows = 64;    // query rows (tokens x heads) that share one pass over the codes
constexpr int kLevelGroup = 16;  // coordinates that share one level table
constexpr int kQueryDigit = 64;  // a query integer is high * 64 + low, or one digit alone
constexpr int kWeightDigit = 32;  // likewise of the weights of 8-bit values
constexpr int kLaneSum = 251;     // largest sum of 8 digits that one 16-bit lane accumulates

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

// Activations [tokens, heads, dim]; the last dimension is contiguous, strides count elements.
struct Activations {
  void* data;
  Dtype dtype;
  int64_t token_stride, head_stride;
};

// One head_dim x head_dim matrix per kv head, stored column after column: at(h)[i * dim + j] is
// row j, column i, so that the products run over output coordinates in vector lanes.
struct Matrices {
  const float* data;
  int64_t head_stride;  // 0 when all heads share one
  const float* at(int head) const { return data ? data + head * head_stride : nullptr; }
};

// The key bias after RoPE, a vector per position i: the sum over j of row rows[j] of the table at i
// times shape j. It is taken out of a key before encoding, and its scores are added back. Pairs of
// coordinates that hold little of it are left out, so most models have count 0. The table is read
// group after group, so what a group needs lies together.
struct Waves {
  const float* table;    // [length / kGroup, table_rows, kGroup]: cosines and sines of the angles
  const int32_t* rows;   // [count]
  const float* shapes;   // [heads, count, dim]
  int count, dim;        // count <= dim
  int64_t table_rows;
  int64_t length;        // positions in the table, a multiple of kGroup
  const float* at(int j, int64_t position) const {
    return table + (position / kGroup * table_rows + rows[j]) * kGroup + position % kGroup;
  }
  const float* shape(int head, int j) const {
    return shapes + ((int64_t)head * count + j) * dim;
  }
};

struct Constants {
  int heads, dim;
  const float* key_center;  // [heads, dim]
  Matrices key_in, query_in, value_in, value_out;
  // Row after row; null for the identity, and unused at 8 bits.
  Matrices key_feedback, value_feedback;
  const float* tdsf;                          // [heads, 6]
  const int8_t *key_levels, *value_levels;    // [heads, dim / 16, 2^bits]; unused at 8 bits
  float key_step, value_step;                 // octaves per scale code; 0: codes mean nothing
  Waves waves;
};

// One (block, kv head) region of the cache and its sections.
struct Layout {
  int dim, block_tokens, key_bits, value_bits;
  int64_t keys, values, key_scales, value_scales, end;
};

struct Cache {
  uint8_t* data;  // [blocks, heads, block_tokens, content]
  int64_t block_stride, head_stride, blocks;
  Layout layout;
  uint8_t* region(int64_t block, int head) const {
    return data + block * block_stride + head * head_stride;
  }
};

struct StoreArgs {
  Activations key, value;  // [tokens, heads, dim]
  int64_t tokens;
  Cache cache;
  const int64_t* slots;      // [tokens], block * block_tokens + offset; negative: not stored
  const int64_t* positions;  // [tokens]
  Constants constants;
};

struct AttendArgs {
  Activations query, out;  // [tokens, heads * group, dim]
  int group;               // query heads per kv head
  int requests;
  Cache cache;
  const int32_t* block_table;  // [requests, table_stride]
  int64_t table_stride, table_width;
  const int32_t* query_starts;  // [requests + 1]
  const int32_t* seq_lens;      // [requests]
  int64_t tokens;
  float scale, softcap;  // softcap 0: none
  int window_left;       // earlier tokens a row may see; negative: all
  const float* sinks;    // [heads * group] or null
  Constants constants;
};

// Consecutive query tokens of one request, with all query heads of one kv head.
// Row i * group + g is token first_token + i at position first_position + i, head head * group + g.
struct Tile {
  int request, head;
  int64_t first_token;
  int first_position, count;
  int rows(int group) const { return count * group; }
  int last_position() const { return first_position + count - 1; }
};

// A row's query as integers of one or two digits. Of fixed size, so that rows lie at fixed distances.
struct QueryDigits {
  int8_t at[2][kMaxDim];
  // Per digit and square: -128 * the sums over even and over odd pairs of coordinates, modulo 2^16,
  // in the low and the high half.
  int32_t lane_offsets[2][kMaxDim / kLevelGroup];
};

// Query rows, ready for integer dot products.
struct QueryRows {
  float* z;             // [rows, dim]: query_in q * scale, in octaves (scores are exponents of 2)
  QueryDigits* digits;  // [rows]
  int32_t* offsets;     // [rows]: 128 * sum of the row's integers (levels are stored plus 128)
  float* unit;          // [rows]: what one integer step is worth
  float* bias;          // [rows]: scale * q . key_center, in octaves
  float* waves;         // [rows, dim]: scale * q . shape j, in octaves
  uint8_t* invalid;     // [rows]: 1 where the query holds NaN or Inf
  QueryRows from(int row, int dim) const {
    return {z + row * dim, digits + row,      offsets + row, unit + row, bias + row,
            waves + row * dim, invalid + row};
  }
};

// Softmax over part of a sequence, not normalised: maximum, sum, weighted values.
struct Partial {
  float *max, *sum;  // [rows]
  float* acc;        // [rows, dim]
  Partial from(int row, int dim) const { return {max + row, sum + row, acc + row * dim}; }
};

// Working memory of one thread.
struct Scratch {
  float* scores;        // [kTileRows, kPiece]: in octaves
  uint8_t* weights;     // [kTileRows, 2, kPiece]: probability times value scale, as integers
  float* weight_units;  // [kTileRows, kPiece / kGroup]
  float* scales;        // [2, kPiece]: of keys, of values
  float* rows;          // [2, kTileRows, kMaxDim]
};

// Stored codes of one group of 32 tokens; `high` is the 1-bit plane of 3-bit codes.
struct GroupCodes {
  const uint8_t *low, *high;
};

// Codes that will be wanted, asked for in dim / 16 equal steps while others are computed.
struct Ahead {
  const uint8_t *low, *high;  // high: null unless there is such a plane, one line a step
  int low_step;               // bytes, 0 for nothing
};

// What an instruction set provides.
struct Kernels {
  const char* name;
  // Encodes and writes `count` tokens of one kv head.
  void (*store)(const StoreArgs&, int head, const int32_t* tokens, int count, Scratch&);
  // The rows of `count` tiles of one kv head, one after another: at most kTileRows.
  void (*load_queries)(const AttendArgs&, const Tile*, int count, const QueryRows&, Scratch&);
  // Attends the tokens of piece `piece` that the tile's rows may see.
  void (*attend_piece)(const AttendArgs&, const Tile&, const QueryRows&, int piece, Scratch&,
                       const Partial& out);
  // Folds the next piece into what came before it.
  void (*merge)(const Partial& into, const Partial& next, int rows, int dim);
  // Normalises, turns back and writes the rows of `count` tiles of one kv head.
  void (*finish)(const AttendArgs&, const Tile*, int count, const QueryRows&, const Partial&,
                 Scratch&);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvxVnni;
extern const Kernels kAvx512;
extern const Kernels kAvx512Vnni;
#elif defined(__aarch64__)
extern const Kernels kNeon;
#endif

Layout make_layout(int key_bits, int value_bits, int dim, int block_tokens);

// The variant in use: the best this CPU runs, or the one that VLLM_TQ_ISA names.
// Throws std::invalid_argument where that name is unknown or the CPU lacks it.
const Kernels& kernels();

// Names of the variants this CPU runs, best first, separated by spaces.
std::string variants();

// Both throw std::invalid_argument for a slot or block outside the cache; then nothing is written.
void store(const StoreArgs& args);
void attend(const AttendArgs& args);

}  // namespace tdsf
