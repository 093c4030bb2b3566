// CUDA source that chooses the next token of each row from its logits; see ``sampling``.
//
// A block has one row, and reads it several times. First it finds the highest logit. Weights are
// exp((logit - highest) / temperature), so that the largest is 1; they are computed again in each
// pass. top_k and top_p become a minimum weight. The bits of positive floats, read as integers,
// have the order of the floats, so this minimum is found by counting weights by their first 11
// bits, then those of one bin by the next 9, and again by the last 9. A bin's sum of weights is
// its count times the bin's least weight, plus a sum of integers. All sums are of integers, so they
// do not depend on the order of the threads.
//
// Then one of PARTS parts of the vocabulary is drawn, and a race draws a token of it, as
// ``sampling.draw`` does.
//
// Grid: (row).
  constexpr int WARPS = THREADS / 32, TEAM = 32 * (WARPS / PARTS);
  static_assert(WARPS % PARTS == 0);
  constexpr int COARSE = 11, FINE = 9;  // bits of a bin's number
  unsigned infinite_bits = 0x7f800000;
  const float infinite = reinterpret_cast<float&>(infinite_bits);
  constexpr float SMALLEST = 8.6736173798840355e-19f;  // 2 ** -60; lesser weights are left out
  constexpr unsigned ORIGIN = 67u << 23;  // the bits of SMALLEST
  constexpr double UNIT = 4398046511104.;  // 2 ** 42: sums of weights are integers of this unit
  typedef unsigned long long Wide;
  struct Bin { int number; unsigned count; Wide above, weight_above, weight; };
  __shared__ unsigned coarse_counts[1 << COARSE], coarse_rests[1 << COARSE];
  __shared__ unsigned fine_counts[1 << FINE], fine_rests[1 << FINE];
  __shared__ Wide warp_counts[WARPS], warp_weights[WARPS];
  __shared__ float warp_best[WARPS], warp_sums[WARPS];
  __shared__ int warp_tokens[WARPS], warp_flags[WARPS];
  __shared__ Bin shared_bin;
  const int row = blockIdx.x, size = logits_shape[1];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const T* own = logits + (long)row * size;

  // Calls ``use`` with the numbers from ``first`` to ``last`` of a row, in ascending order, that a
  // worker takes.
  const auto visit = [&](const auto* numbers, int first, int last, int worker, int workers,
                         auto use) {
    auto one = *numbers;
    using Number = decltype(one);
    constexpr int EACH = WIDE ? 16 / sizeof(Number) : 1;
    struct alignas(16) Pack { Number v[EACH]; };
    #pragma unroll 4
    for (int i = first / EACH + worker; i * EACH < last; i += workers) {
      Pack pack;
      if constexpr (EACH > 1) pack = reinterpret_cast<const Pack*>(numbers)[i];
      else pack.v[0] = numbers[i];
      #pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int at = i * EACH + e;
        if (at >= first && at < last) use(at, static_cast<float>(pack.v[e]));
      }
    }
  };
  // The highest number of all threads and its token, the first one of several; and the flags that
  // all threads have.
  const auto highest = [&](float& best, int& token, int& flags) {
    const auto take = [&](float other, int its_token, int its_flags) {
      if (other > best || (other == best && its_token < token)) {
        best = other;
        token = its_token;
      }
      flags &= its_flags;
    };
    #pragma unroll
    for (int other = 1; other < 32; other *= 2)
      take(__shfl_xor_sync(0xffffffffu, best, other), __shfl_xor_sync(0xffffffffu, token, other),
           __shfl_xor_sync(0xffffffffu, flags, other));
    __syncthreads();  // no thread reads an earlier result
    if (lane == 0) {
      warp_best[warp] = best;
      warp_tokens[warp] = token;
      warp_flags[warp] = flags;
    }
    __syncthreads();
    for (int w = 0; w < WARPS; ++w) take(warp_best[w], warp_tokens[w], warp_flags[w]);
  };

  constexpr int SOUND = 1, NOTHING = 2;  // no NaN and no +inf; only -inf
  float best = -infinite;
  int token = 0, flags = SOUND | NOTHING;
  const auto check = [&](float x) {
    if (!(x < infinite)) flags &= ~SOUND;
    if (x > -infinite) flags &= ~NOTHING;
  };
  visit(own, 0, size, thread, THREADS, [&](int at, float x) {
    if (x > best) {
      best = x;
      token = at;
    }
    if (!CHANGED) check(x);
  });
  if constexpr (CHANGED)
    visit(raw + (long)row * size, 0, size, thread, THREADS, [&](int, float x) { check(x); });
  highest(best, token, flags);
  const bool possible = fabsf(best) < infinite;
  int outcome = !(flags & SOUND) || (masked[0] ? flags & NOTHING : !possible) ? -NONFINITE
      : possible ? token : -NO_CHOICE;
  const int rows = gridDim.x;
  const float temperature = drawn[0] ? options[row] : 0.f;
  if (outcome < 0 || temperature == 0.f) {
    if (thread == 0) out[row] = outcome;
    return;
  }

  const auto weight_of = [&](float x) { return expf((x - best) / temperature); };
  const auto bits_of = [](float weight) { return reinterpret_cast<unsigned&>(weight) - ORIGIN; };
  // Counts weights by ``bits`` of their bits, those before the last ``left``, if the bits before
  // begin with ``prefix``. ``rests`` are sums of the last bits, without the last ``cut``.
  const auto count = [&](unsigned* counts, unsigned* rests, int bits, int left, int cut,
                         unsigned prefix) {
    __syncthreads();  // no thread reads earlier counts
    for (int i = thread; i < 1 << bits; i += THREADS) counts[i] = rests[i] = 0;
    __syncthreads();
    // Successive weights of one bin are added together: all may be the same.
    unsigned bin = 0, number = 0, rest = 0;
    const auto add = [&] {
      if (number) {
        atomicAdd(counts + bin, number);
        atomicAdd(rests + bin, rest);
      }
      number = rest = 0;
    };
    visit(own, 0, size, thread, THREADS, [&](int, float x) {
      const float weight = weight_of(x);
      if (!(weight >= SMALLEST)) return;
      const unsigned key = bits_of(weight), its = key >> left;
      if (its >> bits != prefix) return;
      if ((its & ((1u << bits) - 1)) != bin) add();
      bin = its & ((1u << bits) - 1);
      number += 1;
      rest += (key & ((1u << left) - 1)) >> cut;
    });
    add();
    __syncthreads();
  };
  // The highest bin that, with those above it, has at least ``goal`` weights, or at least that sum
  // of weights; the lowest bin if there are not so many. ``above`` is the number of weights above
  // all bins, ``weight_above`` their sum.
  const auto find = [&](const unsigned* counts, const unsigned* rests, int bits, int left, int cut,
                        unsigned prefix, bool by_count, Wide goal, Wide above, Wide weight_above) {
    const int each = max(1, (1 << bits) / THREADS), first = (1 << bits) - 1 - thread * each;
    const auto weight_in = [&](int bin) {
      const unsigned key = (prefix << bits | bin) << left, bits_ = key + ORIGIN;
      const double last = ldexp(1., (int)(bits_ >> 23) - 150);  // the weight of the last bit
      const double least = ((bits_ & 0x7fffff) | 0x800000) * last;
      // Half of what was cut off, on average.
      const double rest = (double)rests[bin] * (1 << cut) + counts[bin] * (((1 << cut) - 1) / 2.);
      return (Wide)((counts[bin] * least + rest * last) * UNIT + .5);
    };
    Wide counted = 0, weight = 0;
    for (int bin = first; bin > first - each && bin >= 0; --bin) {
      counted += counts[bin];
      weight += weight_in(bin);
    }
    // Sums over the threads before, whose bins are higher.
    const Wide mine = counted, my_weight = weight;
    #pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const Wide other = __shfl_up_sync(0xffffffffu, counted, d);
      const Wide its_weight = __shfl_up_sync(0xffffffffu, weight, d);
      if (lane >= d) {
        counted += other;
        weight += its_weight;
      }
    }
    __syncthreads();  // no thread reads an earlier result
    if (lane == 31) {
      warp_counts[warp] = counted;
      warp_weights[warp] = weight;
    }
    __syncthreads();
    above += counted - mine;
    weight_above += weight - my_weight;
    for (int w = 0; w < warp; ++w) {
      above += warp_counts[w];
      weight_above += warp_weights[w];
    }
    for (int bin = first; bin > first - each && bin >= 0; --bin) {
      const Wide before = by_count ? above : weight_above, its = weight_in(bin);
      const Wide after = before + (by_count ? counts[bin] : its);
      if (before < goal && (after >= goal || bin == 0))
        shared_bin = {bin, counts[bin], above, weight_above, its};
      above += counts[bin];
      weight_above += its;
    }
    __syncthreads();
    return shared_bin;
  };

  float least = 0.f;
  const float top_k = options[rows + row], top_p = options[2 * rows + row];
  if (top_k > 0.f || top_p < 1.f) {
    const int left = 29 - COARSE;
    const int cut = max(0, left - __clz(size));  // so that no sum exceeds 32 bits
    count(coarse_counts, coarse_rests, COARSE, left, cut, 0);
    // The largest minimum with which enough weights remain; ``kept`` becomes their sum.
    const auto minimum = [&](bool by_count, Wide goal, Wide& kept) {
      Bin bin = find(coarse_counts, coarse_rests, COARSE, left, cut, 0, by_count, goal, 0, 0);
      unsigned prefix = bin.number;
      int below = left;
      while (below && bin.count != 1) {
        below -= FINE;
        count(fine_counts, fine_rests, FINE, below, 0, prefix);
        bin = find(fine_counts, fine_rests, FINE, below, 0, prefix, by_count, goal, bin.above,
                   bin.weight_above);
        prefix = prefix << FINE | bin.number;
      }
      kept = bin.weight_above + bin.weight;
      unsigned bits = (prefix << below) + ORIGIN;
      return reinterpret_cast<float&>(bits);
    };
    Wide kept;
    if (top_k > 0.f) {
      least = minimum(true, (Wide)top_k, kept);
    } else {
      const Bin all = find(coarse_counts, coarse_rests, COARSE, left, cut, 0, false, ~0ull, 0, 0);
      kept = all.weight_above + all.weight;
    }
    if (top_p < 1.f) {
      const Wide goal = max((Wide)1, (Wide)ceil((double)top_p * kept));
      least = fmaxf(least, minimum(false, goal, kept));
    }
  }
  least = fmaxf(least, options[3 * rows + row]);

  // Each team of warps adds up one part.
  const int length = (size + PARTS - 1) / PARTS, team = thread / TEAM;
  float sum = 0.f;
  visit(own, team * length, min(size, (team + 1) * length), thread % TEAM, TEAM,
        [&](int, float x) {
          const float weight = weight_of(x);
          if (weight >= least) sum += weight;
        });
  #pragma unroll
  for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
  if (lane == 0) warp_sums[warp] = sum;
  __syncthreads();
  const float* numbers = uniform + (long)row * (1 + length);
  float sums[PARTS], total = 0.f;
  #pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    sums[part] = 0.f;
    #pragma unroll
    for (int w = 0; w < TEAM / 32; ++w) sums[part] += warp_sums[part * (TEAM / 32) + w];
    total += sums[part];
  }
  const float point = fminf(numbers[0] * total, total * 0.99999994f);
  int part_drawn = -1, heaviest = 0;
  float reached = 0.f, most = sums[0];
  #pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    reached += sums[part];
    if (part_drawn < 0 && reached > point && sums[part] > 0.f) part_drawn = part;
    if (sums[part] > most) {
      most = sums[part];
      heaviest = part;
    }
  }
  const int first = (part_drawn < 0 ? heaviest : part_drawn) * length;
  float fastest = -1.f;
  int winner = size;
  visit(own, first, min(size, first + length), thread, THREADS, [&](int at, float x) {
    const float weight = weight_of(x);
    if (!(weight >= least && weight > 0.f)) return;
    const float speed = weight / fmaxf(-log1pf(-numbers[1 + at - first]), 1e-10f);
    if (speed > fastest) {
      fastest = speed;
      winner = at;
    }
  });
  highest(fastest, winner, flags);
  if (thread == 0) out[row] = winner < size ? winner : token;
