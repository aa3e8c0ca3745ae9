// Sorting pairs by expert
#pragma once

GEOMETRY kLaneSets = 64;  // words in which the lanes of bucket_pairs find lanes with the same bucket
GEOMETRY kBucketThreads = 1024;
GEOMETRY kThreadgroupFloats = 8192;  // what 32 KiB of threadgroup memory hold
