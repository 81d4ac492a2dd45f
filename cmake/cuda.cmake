# The CUDA driver's header, where a toolkit is installed. libcuda itself is loaded at run time, so one binary serves machines
# with and without a GPU; without the header the GPU code is left out and says so.
set(MOECACHED_CUDA AUTO CACHE STRING "AUTO: GPU code where cuda.h is found; ON: required; OFF: left out")
set_property(CACHE MOECACHED_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MOECACHED_HAVE_CUDA FALSE)
if(NOT MOECACHED_CUDA STREQUAL "OFF")
  find_path(MOECACHED_CUDA_INCLUDE_DIR cuda.h
    HINTS ENV CUDA_HOME ENV CUDA_PATH
    PATHS /usr/local/cuda /usr/local/cuda/targets/x86_64-linux
    PATH_SUFFIXES include)
  if(MOECACHED_CUDA_INCLUDE_DIR)
    set(MOECACHED_HAVE_CUDA TRUE)
    add_library(moecached_cuda_headers INTERFACE)
    # SYSTEM: the header is not ours, its warnings are not either.
    target_include_directories(moecached_cuda_headers SYSTEM INTERFACE ${MOECACHED_CUDA_INCLUDE_DIR})
  elseif(MOECACHED_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOECACHED_CUDA=ON and no cuda.h was found: set CUDA_HOME or MOECACHED_CUDA_INCLUDE_DIR")
  else()
    message(STATUS "moecached: no cuda.h, GPU code is left out")
  endif()
endif()
