// The sizes of every kernel's threadgroups and tiles, for the host. A shader takes those of its family.
#pragma once
#include "geometry/common.h"
// The others need it.
#include "geometry/attention.h"
#include "geometry/bucket.h"
#include "geometry/combine.h"
#include "geometry/hyper_connection.h"
#include "geometry/index.h"
#include "geometry/linear_attention.h"
#include "geometry/lora.h"
#include "geometry/matmul.h"
#include "geometry/norms.h"
#include "geometry/pointwise.h"
#include "geometry/pooling.h"
#include "geometry/quantize.h"
#include "geometry/rope.h"
#include "geometry/routing.h"
#include "geometry/sampling.h"
