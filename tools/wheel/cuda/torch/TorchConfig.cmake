# SPDX-License-Identifier: Apache-2.0
# Torch as upstream's CMakeLists.txt needs it, for compiling against its stable ABI with
# a CUDA that this environment's torch was not built for (a CPU build has all headers too).
#
# Given: CUDA_TOOLKIT_ROOT_DIR, TORCH_CUDA_ARCH_LIST ("8.0;8.6"), TORCH_FOLDER, TORCH_VERSION;
# VLLM_TQ_ONLY, a regular expression, leaves out all other sources (for trials).

set(CMAKE_CUDA_COMPILER "${CUDA_TOOLKIT_ROOT_DIR}/bin/nvcc")
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(CMAKE_CUDA_ARCHITECTURES OFF) # every source has its own -gencode flags
enable_language(CUDA)

set(CUDA_FOUND TRUE)
set(CUDA_VERSION "${CMAKE_CUDA_COMPILER_VERSION}")
set(Torch_VERSION "${TORCH_VERSION}")
set(TORCH_INCLUDE_DIRS "${TORCH_FOLDER}/include")
foreach(_ARCH ${TORCH_CUDA_ARCH_LIST})
  string(REPLACE "." "" _ARCH "${_ARCH}")
  string(APPEND CMAKE_CUDA_FLAGS " -gencode arch=compute_${_ARCH},code=sm_${_ARCH}")
endforeach()
string(APPEND CMAKE_CUDA_FLAGS " --expt-relaxed-constexpr --expt-extended-lambda")

# Linked by name only: a host with a GPU has the driver, and torch's CUDA build has
# libtorch_cuda. Empty libraries of these names make them needs of ours.
file(WRITE "${CMAKE_BINARY_DIR}/empty.cpp" "")
foreach(_NAME cuda.so.1 torch_cuda.so)
  string(REGEX REPLACE "[.]so.*" "" _TARGET "stub_${_NAME}")
  add_library(${_TARGET} SHARED "${CMAKE_BINARY_DIR}/empty.cpp")
  set_target_properties(${_TARGET} PROPERTIES NO_SONAME ON
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/stubs")
  target_link_options(${_TARGET} PRIVATE "-Wl,-soname,lib${_NAME}")
  target_link_options(${_TARGET} INTERFACE -Wl,--no-as-needed)
endforeach()

add_library(CUDA::cuda_driver INTERFACE IMPORTED)
target_link_libraries(CUDA::cuda_driver INTERFACE stub_cuda)
add_library(CUDA::cudart SHARED IMPORTED)
set_target_properties(CUDA::cudart PROPERTIES
  IMPORTED_LOCATION "${CUDA_TOOLKIT_ROOT_DIR}/lib64/libcudart.so"
  IMPORTED_SONAME libcudart.so.12
  INTERFACE_LINK_LIBRARIES stub_torch_cuda)

add_library(torch INTERFACE)
target_include_directories(torch SYSTEM INTERFACE
  "${TORCH_INCLUDE_DIRS}" "${CUDA_TOOLKIT_ROOT_DIR}/include")
target_link_options(torch INTERFACE -Wl,--as-needed)
# where C++ and CUDA are linked together, g++ is told -lcudart without a place
target_link_directories(torch INTERFACE "${CUDA_TOOLKIT_ROOT_DIR}/lib64")
target_link_libraries(torch INTERFACE "${TORCH_FOLDER}/lib/libtorch_cpu.so")
set(TORCH_LIBRARIES torch)
set(Torch_FOUND TRUE)

if(VLLM_TQ_ONLY)
  function(Python_add_library _NAME)
    list(FILTER ARGN INCLUDE REGEX "^(MODULE|WITH_SOABI|USE_SABI|[0-9.]+)$|${VLLM_TQ_ONLY}")
    _Python_add_library(${_NAME} ${ARGN})
  endfunction()
endif()
