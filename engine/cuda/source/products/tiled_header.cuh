// CUDA source of products of many tokens with the weights of their experts; see ``tiled``. ``ptx``
// and ``grouped_header`` come before it.

// Tokens of one expert: the pairs from ``start`` on. If ``count`` is not positive, there are none.
struct TokenTile { int expert, start, count; };

// The tile of a place. Expert e, whose pairs begin at b, has the places from b / TOKENS + e on; the
// last of them may be empty. So places are found without counting the tiles of other experts.
template <int TOKENS, typename I>
__device__ inline TokenTile tile_at(const I* experts, int pairs, int count, int place) {
  const int expert = leading(count, [&](int e) {
    // Whether its places begin here or before, as b < stop.
    const int stop = (place - e + 1) * TOKENS;
    return stop > 0 && (stop > pairs || static_cast<int>(experts[stop - 1]) >= e);
  }) - 1;
  const int begin = first_from(experts, pairs, expert), end = first_from(experts, pairs, expert + 1);
  const int start = begin + (place - begin / TOKENS - expert) * TOKENS;
  return {expert, start, min(TOKENS, end - start)};
}

// The numbers that ``make_eight`` has made, in the order of the inputs.
template <int BITS> __device__ inline uint4 ascending(const unsigned (&made)[4]) {
  const auto low = [](unsigned a, unsigned b) { return a & 0xffff | b << 16; };
  const auto high = [](unsigned a, unsigned b) { return a >> 16 | b & 0xffff0000; };
  const unsigned a = made[0], b = made[1], c = made[2], d = made[3];
  if constexpr (BITS == 4) return {low(a, b), low(c, d), high(a, b), high(c, d)};
  return {low(a, b), high(a, b), low(c, d), high(c, d)};
}
