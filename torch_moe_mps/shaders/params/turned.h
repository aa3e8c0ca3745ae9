// Attention behind a rotation: behind params/attention.h and params/rope.h
#pragma once

struct TurnedParams {
  AttentionParams attention;
  RopeParams rope;
  uint32_t warm_lines;  // of the weight that threadgroups behind the chunks touch
};
