// Runs a CUDA kernel on the CPU: one fiber per CUDA thread, one block after another.
//
// A fiber runs until its warp or its block has to meet; then the warp's next fiber runs, and the
// next warp only once this one cannot go on. Warps are thus as far apart as the kernel allows, which
// shows missing barriers. ``backwards`` reverses the order of blocks and of warps, and completes
// asynchronous copies as early as possible; without it they are complete as late as possible.
// Shared memory holds NaN when a block begins.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define EMULATED 1
#define __device__
#define alignas(bytes)  // MLX's allocator for the CPU aligns to eight bytes
#define __shared__ static __attribute__((section("shared_memory")))

extern char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));

namespace {

struct Index { unsigned x, y, z; };
Index threadIdx, blockIdx, blockDim, gridDim;

enum Outcome { FINISHED, STUCK, MISMATCHED };  // STUCK: not all threads reach a barrier

struct Copy { void* to; const void* from; bool real; };

constexpr int MAX_GROUPS = 4;

struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool started, done;
  const int* gate;  // goes on once this is no longer ``seen``
  int seen;
  Copy copies[256];
  int begun;
  int group_ends[MAX_GROUPS];  // of the groups of copies, the last one first, the end in ``copies``
};

struct Warp {
  void* posted[32];
  const void* kind;
  int arrived, generation;
};

constexpr int MAX_THREADS = 1024, STACK = 1 << 16;
Fiber* fibers = nullptr;
char* stacks = nullptr;
Warp warps[MAX_THREADS / 32];
int threads, current, live, waiting, released;
bool backwards;
jmp_buf launcher;
void (*body)(void*);
void* body_data;

bool can_run(int thread) {
  const Fiber& fiber = fibers[thread];
  return thread < threads && !fiber.done && (fiber.gate == nullptr || *fiber.gate != fiber.seen);
}

int next_thread() {
  const int own_warp = current / 32, count = (threads + 31) / 32;
  for (int w = 0; w < count; ++w) {
    const int warp = (own_warp + (backwards ? count - w : w)) % count;
    for (int l = 0; l < 32; ++l) {
      const int thread = warp * 32 + (current + 1 + l) % 32;
      if (can_run(thread)) return thread;
    }
  }
  return -1;
}

void run(int thread) {
  current = thread;
  threadIdx = {(unsigned)thread, 0, 0};
  fibers[thread].gate = nullptr;
  if (fibers[thread].started) _longjmp(fibers[thread].place, 1);
  fibers[thread].started = true;
  setcontext(&fibers[thread].context);
}

void leave() {
  const int next = next_thread();
  if (next < 0) _longjmp(launcher, 1 + (live ? STUCK : FINISHED));
  run(next);
}

void wait_until_changed(const int& gate) {
  fibers[current].gate = &gate;
  fibers[current].seen = gate;
  if (!_setjmp(fibers[current].place)) leave();
}

void open_barrier() {
  waiting = 0;
  ++released;
}

void __syncthreads() {
  if (++waiting == live) open_barrier();
  else wait_until_changed(released);
}

void fiber_main() {
  body(body_data);
  fibers[current].done = true;
  --live;
  if (waiting && waiting == live) open_barrier();
  leave();
}

// All lanes of a warp bring their operands; the last one computes for all.
template <typename Operands, typename Compute>
void together(Operands& mine, Compute compute) {
  Warp& warp = warps[current / 32];
  const void* kind = (const void*)&together<Operands, Compute>;
  if (warp.arrived && warp.kind != kind) _longjmp(launcher, 1 + MISMATCHED);
  warp.kind = kind;
  warp.posted[current % 32] = &mine;
  if (++warp.arrived < 32) {
    wait_until_changed(warp.generation);
    return;
  }
  warp.arrived = 0;
  compute((Operands**)warp.posted);
  ++warp.generation;
}

int run_block() {
  for (int t = 0; t < threads; ++t) {
    Fiber& fiber = fibers[t];
    fiber.started = fiber.done = false;
    fiber.gate = nullptr;
    fiber.begun = 0;
    memset(fiber.group_ends, 0, sizeof(fiber.group_ends));
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + (long)t * STACK;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, fiber_main, 0);
  }
  memset(warps, 0, sizeof(warps));
  memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
  live = threads;
  waiting = 0;
  if (const int outcome = _setjmp(launcher)) return outcome - 1;
  run(backwards ? (threads - 1) / 32 * 32 : 0);
  return STUCK;
}

// Grid and block have three numbers each; a block has one dimension.
int launch(
    const unsigned* grid, const unsigned* block, bool reverse, void (*main)(void*), void* data) {
  if (!fibers) {
    fibers = (Fiber*)malloc(sizeof(Fiber) * MAX_THREADS);
    stacks = (char*)malloc((long)STACK * MAX_THREADS);
  }
  threads = block[0];
  backwards = reverse;
  body = main;
  body_data = data;
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], 1, 1};
  const long blocks = (long)grid[0] * grid[1] * grid[2];
  for (long i = 0; i < blocks; ++i) {
    const long b = reverse ? blocks - 1 - i : i;
    blockIdx = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])};
    if (const int outcome = run_block()) return outcome;
  }
  return FINISHED;
}

}  // namespace
#include "device.h"
