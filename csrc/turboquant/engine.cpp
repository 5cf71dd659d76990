// SPDX-License-Identifier: Apache-2.0
//
// What is common to all instruction sets: choosing one, checking arguments, cutting work into
// tiles and spreading tiles over threads.
//
// Attention is cut into tiles of query rows (one request, one kv head), and tiles of one head into
// bundles that share a pass over the head's matrices. Enough bundles: a thread takes one, and walks
// each tile's pieces of the sequence in order. Too few: a bundle's tiles are shared out, and where
// these are too few their pieces, each of which leaves its partial result; these are merged in the
// same order. A piece is always computed by itself and merged in order, and every row of a product
// with a matrix is a sum of its own, so no bit depends on which of this happens.
#include <omp.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "tdsf.h"

namespace tdsf {
namespace {

// Memory that grows and is kept: one allocation per thread, not per call.
class Arena {
 public:
  // Forgets what it lent and makes room for `bytes` in all.
  void reset(size_t bytes) {
    used_ = 0;
    if (bytes <= size_) return;
    memory_.reset(static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
    if (!memory_) throw std::bad_alloc();
    size_ = bytes;
  }
  template <class T>
  T* take(size_t count) {
    T* p = reinterpret_cast<T*>(memory_.get() + used_);
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return p;
  }

 private:
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  size_t size_ = 0, used_ = 0;
};

// Lays out the same members twice: once to count bytes, once to hand out pointers.
class Counter {
 public:
  template <class T>
  T* take(size_t count) {
    bytes += (count * sizeof(T) + 63) / 64 * 64;
    return nullptr;
  }
  size_t bytes = 0;
};

template <class Memory>
Scratch make_scratch(Memory& memory) {
  Scratch s;
  s.scores = memory.template take<float>(kTileRows * kPiece);
  s.weights = memory.template take<uint8_t>(2 * kTileRows * kPiece);
  s.weight_units = memory.template take<float>(kTileRows * kPiece / kGroup);
  s.scales = memory.template take<float>(2 * kPiece);
  s.rows = memory.template take<float>(2 * kTileRows * kMaxDim);
  return s;
}

template <class Memory>
QueryRows make_queries(Memory& memory, int rows, int dim) {
  QueryRows q;
  q.z = memory.template take<float>(rows * dim);
  q.digits = memory.template take<QueryDigits>(rows);
  q.offsets = memory.template take<int32_t>(rows);
  q.unit = memory.template take<float>(rows);
  q.bias = memory.template take<float>(rows);
  q.waves = memory.template take<float>(rows * dim);
  q.invalid = memory.template take<uint8_t>(rows);
  return q;
}

template <class Memory>
Partial make_partial(Memory& memory, int rows, int dim) {
  Partial p;
  p.max = memory.template take<float>(rows);
  p.sum = memory.template take<float>(rows);
  p.acc = memory.template take<float>(rows * dim);
  return p;
}

// Everything a thread needs for one tile at a time.
struct Workspace {
  Scratch scratch;
  QueryRows queries;
  Partial state, piece;
};

template <class Memory>
Workspace make_workspace(Memory& memory) {
  Workspace w;
  w.scratch = make_scratch(memory);
  w.queries = make_queries(memory, kTileRows, kMaxDim);
  w.state = make_partial(memory, kTileRows, kMaxDim);
  w.piece = make_partial(memory, kTileRows, kMaxDim);
  return w;
}

Workspace& workspace() {
  thread_local Arena arena;
  thread_local Workspace mine = [] {
    Counter counter;
    make_workspace(counter);
    arena.reset(counter.bytes);
    return make_workspace(arena);
  }();
  return mine;
}

void clear(const Partial& state, int rows) {
  std::fill_n(state.max, rows, -INFINITY);
  std::fill_n(state.sum, rows, 0.0f);
}

struct Pieces {
  int first, last;  // inclusive
  int count() const { return last - first + 1; }
};

Pieces pieces_of(const AttendArgs& args, const Tile& tile) {
  const int seen = args.window_left < 0 ? 0 : tile.first_position - args.window_left;
  return {std::max(seen, 0) / kPiece, tile.last_position() / kPiece};
}

// Kept from call to call, as all lists here are, so that a step allocates nothing.
const std::vector<Tile>& make_tiles(const AttendArgs& args) {
  thread_local std::vector<Tile> tiles;
  tiles.clear();
  const int step = kTileRows / args.group;
  for (int head = 0; head < args.constants.heads; head++)
    for (int r = 0; r < args.requests; r++) {
      const int first = args.query_starts[r], rows = args.query_starts[r + 1] - first;
      for (int at = 0; at < rows; at += step)
        tiles.push_back({r, head, first + at, args.seq_lens[r] - rows + at,
                         std::min(step, rows - at)});
    }
  return tiles;
}

// Pieces times rows: what attending takes.
int64_t cost_of(const AttendArgs& args, const Tile& tile) {
  return (int64_t)pieces_of(args, tile).count() * tile.count;
}

// Consecutive tiles of one head, kTileRows rows at most.
struct Bundle {
  const Tile* tiles;
  int count, rows;
  int64_t cost;
};

const std::vector<Bundle>& make_bundles(const AttendArgs& args) {
  thread_local std::vector<Bundle> bundles;
  bundles.clear();
  for (const Tile& tile : make_tiles(args)) {
    const int rows = tile.rows(args.group);
    if (bundles.empty() || bundles.back().tiles->head != tile.head ||
        bundles.back().rows + rows > kTileRows)
      bundles.push_back({&tile, 0, 0, 0});
    Bundle& bundle = bundles.back();
    bundle.count++;
    bundle.rows += rows;
    bundle.cost += cost_of(args, tile);
  }
  return bundles;
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("tdsf: " + what); }

void check(const AttendArgs& args) {
  const int tokens = args.cache.layout.block_tokens;
  for (int r = 0; r < args.requests; r++) {
    const int64_t first = args.query_starts[r], last = args.query_starts[r + 1];
    const int64_t length = args.seq_lens[r], rows = last - first;
    const auto refuse_request = [&](const std::string& what) {
      refuse("request " + std::to_string(r) + what);
    };
    if (first < 0 || rows < 0 || last > args.tokens)
      refuse_request(" has query rows " + std::to_string(first) + " to " + std::to_string(last) +
                     " of " + std::to_string(args.tokens));
    if (rows == 0) continue;
    if (args.constants.waves.count > 0 && length > args.constants.waves.length)
      refuse_request(" has " + std::to_string(length) + " tokens, the key bias is known for " +
                     std::to_string(args.constants.waves.length));
    if (length < rows)
      refuse_request(" has " + std::to_string(rows) + " query rows but a sequence of " +
                     std::to_string(length));
    if ((length + tokens - 1) / tokens > args.table_width)
      refuse_request(" has " + std::to_string(length) + " tokens, its block table holds " +
                     std::to_string(args.table_width) + " blocks of " + std::to_string(tokens));
    const int64_t seen = args.window_left < 0 ? 0 : length - rows - args.window_left;
    for (int64_t b = std::max<int64_t>(seen, 0) / tokens; b * tokens < length; b++) {
      const int64_t block = args.block_table[r * args.table_stride + b];
      if (block < 0 || block >= args.cache.blocks)
        refuse_request(" names block " + std::to_string(block) + " of a cache of " +
                       std::to_string(args.cache.blocks));
    }
  }
}

// All pieces of a tile, in order.
void attend_tile(const Kernels& k, const AttendArgs& args, const Tile& tile, const QueryRows& q,
                 const Partial& state) {
  Workspace& w = workspace();
  const int rows = tile.rows(args.group);
  const Pieces pieces = pieces_of(args, tile);
  clear(state, rows);
  for (int p = pieces.first; p <= pieces.last; p++) {
    k.attend_piece(args, tile, q, p, w.scratch, w.piece);
    k.merge(state, w.piece, rows, args.constants.dim);
  }
}

void attend_bundle(const Kernels& k, const AttendArgs& args, const Bundle& bundle) {
  Workspace& w = workspace();
  k.load_queries(args, bundle.tiles, bundle.count, w.queries, w.scratch);
  int row = 0;
  for (int i = 0; i < bundle.count; i++) {
    const Tile& tile = bundle.tiles[i];
    attend_tile(k, args, tile, w.queries.from(row, args.constants.dim),
                w.state.from(row, args.constants.dim));
    row += tile.rows(args.group);
  }
  k.finish(args, bundle.tiles, bundle.count, w.queries, w.state, w.scratch);
}

// What one thread does at a time where bundles are shared out: a whole tile, or one of its pieces.
struct Item {
  const Tile* tile;
  int row;    // where the tile's rows begin among those of all bundles
  int piece;  // -1: all
};

struct Lists {
  Arena arena;
  std::vector<int> starts;         // first row of each bundle
  std::vector<Item> split, items;  // tiles whose pieces are shared out; what to do next
};

constexpr size_t kPartialBytes = 64 << 20;  // of pieces that wait to be merged, or one of each tile

// Bundles that would keep single threads too long; a tile that costs more than `share` would too.
void attend_shared(const Kernels& k, const AttendArgs& args, const std::vector<Bundle>& bundles,
                   int64_t share) {
  thread_local Lists kept;
  Lists& lists = kept;  // inside a parallel region `kept` names each thread's own
  auto& [arena, starts, split, items] = lists;
  starts.clear(), split.clear(), items.clear();
  const int dim = args.constants.dim;
  int rows = 0, longest = 0;
  for (const Bundle& bundle : bundles) {
    starts.push_back(rows);
    for (int i = 0; i < bundle.count; i++) {
      const Tile& tile = bundle.tiles[i];
      const int pieces = pieces_of(args, tile).count();
      const bool apart = pieces > 1 && cost_of(args, tile) > share;
      if (apart) longest = std::max(longest, pieces);
      (apart ? split : items).push_back({&tile, rows, -1});
      rows += tile.rows(args.group);
    }
  }
  // Pieces are computed `window` at a time.
  const int fit = (int)(kPartialBytes / ((size_t)rows * (dim + 2) * sizeof(float)));
  const int window = std::clamp(longest, 1, std::max(fit, 1));
  Counter counter;
  const auto lay_out = [&](auto& memory) {
    return std::tuple{make_queries(memory, rows, dim), make_partial(memory, rows, dim),
                      make_partial(memory, split.empty() ? 0 : rows * window, dim)};
  };
  lay_out(counter);
  arena.reset(counter.bytes);
  const auto [queries, state, partials] = lay_out(arena);

#pragma omp parallel for schedule(dynamic)
  for (size_t b = 0; b < bundles.size(); b++)
    k.load_queries(args, bundles[b].tiles, bundles[b].count, queries.from(starts[b], dim),
                   workspace().scratch);
  for (const Item& item : split)
    clear(state.from(item.row, dim), item.tile->rows(args.group));
  for (int from = 0; from == 0 || from < longest; from += window) {
    for (const Item& item : split)
      for (int p = from; p < std::min(from + window, pieces_of(args, *item.tile).count()); p++)
        items.push_back({item.tile, item.row, p});
    // Neighbouring pieces to one thread: each asks for the next one's keys.
    const int run = std::max(1, (int)items.size() / (8 * omp_get_max_threads()));
    const auto partial = [&](const Item& item, int p) {
      return partials.from((p - from) * rows + item.row, dim);
    };
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, run)
      for (size_t i = 0; i < items.size(); i++) {
        const Item& item = items[i];
        const QueryRows q = queries.from(item.row, dim);
        if (item.piece < 0)
          attend_tile(k, args, *item.tile, q, state.from(item.row, dim));
        else
          k.attend_piece(args, *item.tile, q, pieces_of(args, *item.tile).first + item.piece,
                         workspace().scratch, partial(item, item.piece));
      }
#pragma omp for schedule(dynamic)
      for (size_t i = 0; i < split.size(); i++) {
        const Item& item = split[i];
        const int end = std::min(from + window, pieces_of(args, *item.tile).count());
        for (int p = from; p < end; p++)
          k.merge(state.from(item.row, dim), partial(item, p), item.tile->rows(args.group), dim);
      }
    }
    items.clear();
  }
#pragma omp parallel for schedule(dynamic)
  for (size_t b = 0; b < bundles.size(); b++)
    k.finish(args, bundles[b].tiles, bundles[b].count, queries.from(starts[b], dim),
             state.from(starts[b], dim), workspace().scratch);
}

bool runs_here(const Kernels& k) {
#if defined(__x86_64__)
  if (&k == &kAvx2) return __builtin_cpu_supports("avx2");
  if (&k == &kAvxVnni) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("avxvnni");
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (&k == &kAvx512) return wide;
  if (&k == &kAvx512Vnni) return wide && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
  if (&k == &kNeon) return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#endif
  return &k == &kPortable;
}

// What this CPU runs, best first.
std::vector<const Kernels*> candidates() {
#if defined(__x86_64__)
  std::vector<const Kernels*> all = {&kAvx512Vnni, &kAvx512, &kAvxVnni, &kAvx2, &kPortable};
#elif defined(__aarch64__)
  std::vector<const Kernels*> all = {&kNeon, &kPortable};
#else
  std::vector<const Kernels*> all = {&kPortable};
#endif
  std::erase_if(all, [](const Kernels* k) { return !runs_here(*k); });
  return all;
}

const Kernels& choose() {
  const char* wanted = std::getenv("VLLM_TQ_ISA");
  for (const Kernels* k : candidates())
    if (!wanted || !*wanted || !std::strcmp(wanted, k->name)) return *k;
  refuse("VLLM_TQ_ISA is " + std::string(wanted) + "; this CPU runs " + variants());
}

}  // namespace

Layout make_layout(int key_bits, int value_bits, int dim, int block_tokens) {
  const auto code_bytes = [dim](int bits) {
    return bits == 3 ? dim / 4 + 4 * ((dim + 31) / 32) : dim * bits / 8;
  };
  Layout at{dim, block_tokens, key_bits, value_bits, 4 * dim, 0, 0, 0, 0};
  at.values = at.keys + (int64_t)block_tokens * code_bytes(key_bits);
  at.key_scales = at.values + (int64_t)block_tokens * code_bytes(value_bits);
  at.value_scales = at.key_scales + block_tokens;
  at.end = at.value_scales + block_tokens;
  return at;
}

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

std::string variants() {
  std::string names;
  for (const Kernels* k : candidates()) names += (names.empty() ? "" : " ") + std::string(k->name);
  return names;
}

void store(const StoreArgs& args) {
  const int64_t slots = args.cache.blocks * args.cache.layout.block_tokens;
  const Waves& waves = args.constants.waves;
  for (int64_t t = 0; waves.count > 0 && t < args.tokens; t++)
    if (args.slots[t] >= 0 && (args.positions[t] < 0 || args.positions[t] >= waves.length))
      refuse("position " + std::to_string(args.positions[t]) + " of token " + std::to_string(t) +
             "; the key bias is known for " + std::to_string(waves.length));
  for (int64_t t = 0; t < args.tokens; t++)
    if (args.slots[t] >= slots)
      refuse("slot " + std::to_string(args.slots[t]) + " of token " + std::to_string(t) +
             " lies outside a cache of " + std::to_string(slots) + " slots");
  const Kernels& k = kernels();
  // Tokens of one group of 32 share bytes, so one bucket holds all tokens of a group.
  const int heads = args.constants.heads;
  const int buckets = (int)std::min<int64_t>((args.tokens + 31) / 32, 4 * omp_get_max_threads());
  const auto bucket_of = [&](int64_t t) {
    return args.slots[t] < 0 ? -1 : (int)(args.slots[t] / kGroup % buckets);
  };
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int bucket = 0; bucket < buckets; bucket++)
    for (int head = 0; head < heads; head++) {
      thread_local std::vector<int32_t> mine;
      mine.clear();
      for (int64_t t = 0; t < args.tokens; t++)
        if (bucket_of(t) == bucket) mine.push_back((int32_t)t);
      if (!mine.empty()) k.store(args, head, mine.data(), (int)mine.size(), workspace().scratch);
    }
}

void attend(const AttendArgs& args) {
  check(args);
  const Kernels& k = kernels();
  thread_local std::vector<Bundle> shared, single;
  shared.clear(), single.clear();
  const std::vector<Bundle>& bundles = make_bundles(args);
  int64_t all = 0;
  for (const Bundle& bundle : bundles) all += bundle.cost;
  const int threads = omp_get_max_threads();
  const int64_t share = threads == 1 ? all : all / (4 * threads);
  for (const Bundle& bundle : bundles) {
    const bool divides = bundle.count > 1 || pieces_of(args, *bundle.tiles).count() > 1;
    (divides && bundle.cost > share ? shared : single).push_back(bundle);
  }
  if (!shared.empty()) attend_shared(k, args, shared, share);
  const std::vector<Bundle>& rest = single;  // inside, `single` names each thread's own
#pragma omp parallel for schedule(dynamic)
  for (size_t b = 0; b < rest.size(); b++) attend_bundle(k, args, rest[b]);
}

}  // namespace tdsf
