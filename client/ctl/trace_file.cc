#include "client/ctl/trace_file.h"

#include <fcntl.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <nlohmann/json.hpp>

namespace moecached::ctl {
namespace {

constexpr std::size_t kBufferBytes = 256u << 10;
constexpr int kLevel = 9;

struct ContextFree {
  void operator()(ZSTD_CCtx* context) const { ZSTD_freeCCtx(context); }
};

std::string why(const std::string& what) { return what + ": " + std::strerror(errno); }

void append_number(std::string& text, std::uint64_t value) {
  char digits[24];
  text.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

template <typename T>
bool read_one(std::FILE* file, T* value) {
  return std::fread(value, sizeof *value, 1, file) == 1;
}

}  // namespace

// Text to a file, compressed if its name says so.
class TraceFile::Writer {
 public:
  Writer(std::FILE* file, bool compress) : file_(file) {
    if (!compress) return;
    context_.reset(ZSTD_createCCtx());
    ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_compressionLevel, kLevel);
    ZSTD_CCtx_setParameter(context_.get(), ZSTD_c_checksumFlag, 1);
    out_.resize(ZSTD_CStreamOutSize());
  }
  std::string& text() { return text_; }  // what is to be written; look() after each line
  bool look() { return text_.size() < kBufferBytes || put(ZSTD_e_continue); }
  bool finish() { return put(ZSTD_e_end) && std::fflush(file_) == 0; }

 private:
  bool put(ZSTD_EndDirective directive) {
    bool ok = true;
    if (!context_) {
      ok = std::fwrite(text_.data(), 1, text_.size(), file_) == text_.size();
    } else {
      ZSTD_inBuffer in{text_.data(), text_.size(), 0};
      for (bool more = true; ok && more;) {
        ZSTD_outBuffer out{out_.data(), out_.size(), 0};
        const std::size_t left = ZSTD_compressStream2(context_.get(), &out, &in, directive);
        ok = ZSTD_isError(left) == 0 && std::fwrite(out_.data(), 1, out.pos, file_) == out.pos;
        more = directive == ZSTD_e_end ? left != 0 : in.pos < in.size;
      }
    }
    text_.clear();
    return ok;
  }
  std::FILE* file_;
  std::unique_ptr<ZSTD_CCtx, ContextFree> context_;
  std::string text_;
  std::vector<char> out_;
};

TraceFile::TraceFile(std::string path, std::uint32_t n_layers, std::uint32_t k)
    : path_(std::move(path)), n_layers_(n_layers), k_(k) {}

TraceFile::Problem TraceFile::open() {
  const std::string part = path_ + ".rows";
  const int fd = ::open(part.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) return why("cannot create " + part);
  ::unlink(part.c_str());  // gone with this process, however it ends
  spool_.reset(::fdopen(fd, "w+b"));
  if (!spool_) return why("cannot open " + part);
  return std::nullopt;
}

void TraceFile::add(const TraceRow& row) {
  const auto put = [this](const void* data, std::size_t bytes) {
    failed_ = failed_ || std::fwrite(data, 1, bytes, spool_.get()) != bytes;
    spooled_ += bytes;
  };
  ++n_rows_;
  if (row.n_tokens > 1) ++n_batches_;
  const std::uint64_t head[] = {row.seq, row.tok, row.prefill ? 0u : 1u};
  put(head, sizeof head);
  for (const auto& experts : row.experts) {
    const auto n = static_cast<std::uint32_t>(experts.size());
    k_ = std::max(k_, n);
    put(&n, sizeof n);
    put(experts.data(), n * sizeof experts[0]);
  }
}

TraceFile::Problem TraceFile::write_rows(Writer& writer) {
  const std::string damaged = "cannot read back what was recorded";
  if (failed_ || std::fflush(spool_.get()) != 0)
    return "cannot keep rows beside " + path_ + ": is the disk full?";
  std::rewind(spool_.get());
  std::vector<std::uint16_t> experts;
  for (std::uint64_t row = 0; row < n_rows_; ++row) {
    std::string& text = writer.text();
    std::uint64_t head[3];
    if (!read_one(spool_.get(), &head)) return damaged;
    append_number(text, head[0]);
    append_number(text += ',', head[1]);
    append_number(text += ',', head[2]);
    for (std::uint32_t layer = 0; layer < n_layers_; ++layer) {
      std::uint32_t n = 0;
      if (!read_one(spool_.get(), &n) || n > k_) return damaged;
      experts.resize(n);
      if (std::fread(experts.data(), sizeof experts[0], n, spool_.get()) != n) return damaged;
      for (const std::uint16_t expert : experts) append_number(text += ',', expert);
      for (std::uint32_t i = n; i < k_; ++i) text += ",-1";
    }
    text += '\n';
    if (!writer.look()) return why("cannot write " + path_);
  }
  return std::nullopt;
}

TraceFile::Problem TraceFile::close(nlohmann::ordered_json about) {
  const std::string fresh = path_ + ".new";
  const std::unique_ptr<std::FILE, Closer> file(std::fopen(fresh.c_str(), "wbe"));
  if (!file) return why("cannot create " + fresh);
  Writer writer(file.get(), path_.ends_with(".zst"));
  about["k"] = k_;
  std::string& text = writer.text();
  text = "# moetrace-csv v1 " + about.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) +
         "\nseq,tok,phase";
  for (std::uint32_t layer = 0; layer < n_layers_; ++layer) {
    for (std::uint32_t i = 0; i < k_; ++i) {
      append_number(text += ",L", layer);
      append_number(text += '_', i);
    }
  }
  text += '\n';
  Problem problem = write_rows(writer);
  if (!problem && !writer.finish()) problem = why("cannot write " + fresh);
  if (!problem && std::rename(fresh.c_str(), path_.c_str()) != 0) problem = why("cannot rename to " + path_);
  if (problem) ::unlink(fresh.c_str());
  return problem;
}

}  // namespace moecached::ctl
