// Many candidates in step.cu, which has what is used here: until few are left, and where they are equal.

// Many candidates: all programs of the sequence count those of each value of their next bits, until few are left or their
// keys are equal. Their keys share the bits of `shared` from `bits` up. The programs of a sequence do this after all earlier
// sequences that they have tiles of, so that none waits for one that waits for it.
__device__ __noinline__ void narrow(int* level, int* met, const float* worth, Piece& piece, int bits, int shared, Tail& s) {
  const int tid = threadIdx.x, n = rows_of(piece), programs = piece.last - piece.begin + 1;
#pragma unroll 1
  for (; piece.left > FEW && bits > 0; level += 256, ++met) {
    const int width = min(bits, 8), shift = bits - width, rest = piece.wanted - piece.sure;
    for (int i = tid; i < 256; i += THREADS) s.desk.count[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < n; i += THREADS) {
      const int key = key_of(worth[i]);
      if (key >= piece.least && key < piece.next) atomicAdd(s.desk.count + (key >> shift & (1 << width) - 1), 1);
    }
    __syncthreads();
    for (int i = tid; i < 256; i += THREADS)
      if (s.desk.count[i]) atomicAdd(level + i, s.desk.count[i]);
    arrive(met);
    wait_for_programs(met, programs);
    // Thread i has value 255 - i: sums run from the largest value down.
    const int own = tid < 256 ? read_volatile(level + 255 - tid) : 0;
    const int above = sum_before<THREADS>(own, s.desk.scratch);
    if (above < rest && above + own >= rest) {
      const int from = shared | 255 - tid << shift, last = from + ((1 << shift) - 1);
      s.desk.digit = from;
      piece.sure += above, piece.left = own;
      piece.least = max(piece.least, from), piece.next = piece.next - 1 > last ? last + 1 : piece.next;
    }
    __syncthreads();
    shared = s.desk.digit, bits = shift;
    __syncthreads();
  }
}

// Of many equal candidates the first rows: `earlier` of them are programs' before this one.
__device__ __noinline__ void take_equal(const float* s_worth, const Piece& piece, int earlier, const int* table, int* to,
                                        Desk& desk) {
  const int rest = piece.wanted - piece.sure, n = rows_of(piece);
#pragma unroll 1
  for (int start = 0; start < n && earlier < rest; start += THREADS) {
    const int i = start + (int)threadIdx.x, key = i < n ? key_of(s_worth[piece.at * 8 + i]) : -1;
    const int takes = key >= piece.least && key < piece.next, at = earlier + sum_before<THREADS>(takes, desk.scratch);
    if (takes && at < rest) to[at] = table[piece.first * 8 + i];
    if (threadIdx.x == THREADS - 1) desk.rest = at + takes;
    __syncthreads();
    earlier = desk.rest;
  }
}
