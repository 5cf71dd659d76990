// SPDX-License-Identifier: Apache-2.0
//
// Rows in blocks whose size the compiler knows, so that their sums stay in registers. Included by
// each variant inside its unnamed namespace.

// Calls f with the rows in blocks of kMost and a last one of what is left.
template <int kMost, class F>
inline void in_blocks(int rows, F f) {
  int r = 0;
  for (; r + kMost <= rows; r += kMost) f(std::integral_constant<int, kMost>{}, r);
  if constexpr (kMost > 1)
    if (r < rows)
      in_blocks<kMost - 1>(rows - r, [&](auto count, int more) { f(count, r + more); });
}
