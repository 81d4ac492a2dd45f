#include "bench/replay/line_reader.h"

#include <zstd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

namespace moecached::replay {
namespace {

constexpr std::size_t kInputBytes = 256u << 10;
constexpr unsigned char kZstdMagic[] = {0x28, 0xb5, 0x2f, 0xfd};

struct FileCloser {
  void operator()(std::FILE* file) const {
    if (file != stdin) std::fclose(file);
  }
};
struct StreamFree {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};

class FileLines final : public LineReader {
 public:
  FileLines(std::string path, std::FILE* file) : path_(std::move(path)), file_(file), input_(kInputBytes) {}

  Status begin() {
    if (Status filled = fill(); !filled) return filled;
    if (end_ < sizeof kZstdMagic || std::memcmp(input_.data(), kZstdMagic, sizeof kZstdMagic) != 0)
      return ok();
    stream_.reset(ZSTD_createDStream());
    // The most that a decoder takes without being asked to; a file that wants more is no trace.
    if (stream_) ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, 27);
    if (!stream_) return Fault{FaultCode::kSystem, path_ + ": no memory for the zstd decoder"};
    output_.resize(ZSTD_DStreamOutSize());
    return ok();
  }

  Result<bool> next(std::string_view* line) override {
    line_.clear();
    for (;;) {
      const std::string_view text = available();
      const std::size_t end = text.find('\n');
      if (end != std::string_view::npos && line_.empty()) {  // the usual case: no copy
        *line = text.substr(0, end);
        consume(end + 1);
        break;
      }
      line_.append(text.substr(0, end));
      consume(end == std::string_view::npos ? text.size() : end + 1);
      if (line_.size() > kLineBytesMax) {
        return Fault{FaultCode::kLimit, path_ + ", line " + std::to_string(number_ + 1) + ": longer than " +
                                            std::to_string(kLineBytesMax >> 20) + " MiB: is this a trace?"};
      }
      if (end != std::string_view::npos) {
        *line = line_;
        break;
      }
      const Result<bool> more = refill();
      if (!more) return more.error();
      if (*more) continue;
      if (line_.empty()) return false;
      *line = line_;  // a last line without an end
      break;
    }
    if (line->ends_with('\r')) line->remove_suffix(1);
    ++number_;
    return true;
  }
  std::uint64_t line_number() const override { return number_; }

 private:
  std::string_view available() const {
    return stream_ ? std::string_view(output_.data() + out_at_, out_end_ - out_at_)
                   : std::string_view(input_.data() + at_, end_ - at_);
  }
  void consume(std::size_t n) { (stream_ ? out_at_ : at_) += n; }

  Status fill() {
    at_ = 0;
    end_ = std::fread(input_.data(), 1, input_.size(), file_.get());
    if (end_ < input_.size() && std::ferror(file_.get()) != 0) return system_fault("read " + path_, errno);
    return ok();
  }

  // True when there is more to look at. REQUIRES: what was available is consumed.
  Result<bool> refill() {
    if (!stream_) {
      if (Status filled = fill(); !filled) return filled.error();
      return end_ > 0;
    }
    for (;;) {
      if (at_ == end_) {
        if (Status filled = fill(); !filled) return filled.error();
        if (end_ == 0 && !in_frame_) return false;
        if (end_ == 0) {
          return Fault{FaultCode::kInvalid,
                       path_ + ", line " + std::to_string(number_ + 1) +
                           ": the zstd data end here, the file was cut off: copy it or record it again"};
        }
      }
      ZSTD_inBuffer in{input_.data(), end_, at_};
      ZSTD_outBuffer out{output_.data(), output_.size(), 0};
      const std::size_t hint = ZSTD_decompressStream(stream_.get(), &out, &in);
      if (ZSTD_isError(hint) != 0) {
        return Fault{FaultCode::kInvalid, path_ + ", after line " + std::to_string(number_) +
                                              ": damaged zstd data (" + ZSTD_getErrorName(hint) +
                                              "): copy the file again"};
      }
      in_frame_ = hint != 0;
      at_ = in.pos;
      out_at_ = 0;
      out_end_ = out.pos;
      if (out_end_ > 0) return true;
    }
  }

  const std::string path_;
  const std::unique_ptr<std::FILE, FileCloser> file_;
  std::unique_ptr<ZSTD_DStream, StreamFree> stream_;
  std::vector<char> input_, output_;
  std::size_t at_ = 0, end_ = 0, out_at_ = 0, out_end_ = 0;
  bool in_frame_ = false;
  std::string line_;  // one that lies in two buffers
  std::uint64_t number_ = 0;
};

}  // namespace

Result<std::unique_ptr<LineReader>> LineReader::open(const std::string& path) {
  std::FILE* file = path == "-" ? stdin : std::fopen(path.c_str(), "rb");
  if (file == nullptr) return system_fault("open " + path, errno);
  auto lines = std::make_unique<FileLines>(path == "-" ? "standard input" : path, file);
  if (Status begun = lines->begin(); !begun) return std::move(begun).error();
  return std::unique_ptr<LineReader>(std::move(lines));
}

}  // namespace moecached::replay
