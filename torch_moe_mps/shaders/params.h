// The parameters of every kernel, for the host. A shader takes those of its family.
#pragma once
#include "params/common.h"
#include "params/expert_sum.h"
// The others need these.
#include "params/attention.h"
#include "params/bucket.h"
#include "params/combine.h"
#include "params/hyper_connection.h"
#include "params/index.h"
#include "params/linear_attention.h"
#include "params/matmul.h"
#include "params/norms.h"
#include "params/pointwise.h"
#include "params/pooling.h"
#include "params/probe.h"
#include "params/quantize.h"
#include "params/rope.h"
#include "params/routing.h"
#include "params/sampling.h"
#include "params/write_cache.h"
// They need two others each.
#include "params/chosen.h"
#include "params/turned.h"
