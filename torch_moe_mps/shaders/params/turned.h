// Attention behind a rotation: behind params/attention.h and params/rope.h
#pragma once

struct TurnedParams {
  AttentionParams attention;
  RopeParams rope;
};
