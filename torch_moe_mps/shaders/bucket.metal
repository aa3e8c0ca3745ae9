#include "bucket.h"

INSTANTIATE("bucket_pairs", bucket_pairs<MOE_DTYPE>)
INSTANTIATE("ids_by_expert", ids_by_expert<MOE_DTYPE>)
