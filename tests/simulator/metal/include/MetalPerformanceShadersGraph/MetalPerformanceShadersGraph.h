// What PyTorch's MPS headers name.
#pragma once
@class MPSGraph, MPSGraphExecutionDescriptor, MPSGraphCompilationDescriptor;
