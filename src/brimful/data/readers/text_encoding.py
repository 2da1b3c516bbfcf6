"""Text of files as UTF-8, whatever it is encoded in.

Without a word from the user, text is UTF-8, or UTF-16 where a byte-order mark says so. Bytes that are not UTF-8 are
most often Windows-1252, as spreadsheets and old exports write it: in the whole file, or in a few values that were
pasted into UTF-8. Both are read byte by byte: what is valid UTF-8 stays, any other byte is the character of
Windows-1252 (its five free bytes are control characters, as in WHATWG's standard). Characters of UTF-8 that were cut
in the middle become U+FFFD. How many bytes there were is said.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator

from brimful.core.errors import DataError, printable

BOM = b"\xef\xbb\xbf"
#: How text in UTF-16 begins.
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: The character of Windows-1252 for each byte as Python's `surrogateescape` shows it.
_WINDOWS = {0xDC00 + byte: bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in range(0x80, 0x100)}
_NOT_UTF8 = re.compile("[\udc80-\udcff]+")
_UTF8 = re.compile("[\x80-\ud7ff\ue000-\U0010ffff]")
#: The beginning of a character of three or four bytes, without its end.
_CUT = re.compile("[\udce0-\udcf4][\udc80-\udcbf]{1,2}")
#: From so many bytes, and such a share of all letters on, text is in no western encoding. Bytes of other encodings make
#: characters of UTF-8 by chance, but fewer than there are bytes left.
_MANY_BYTES, _MANY_SHARE = 16, 0.3
_SOME = "cp1251, gb18030, shift_jis, ..."


class TextDecoder:
    """The text of one file as UTF-8, and what was found on the way. encoding: None to see it.

    begins: the first bytes of the file, by which UTF-16 is seen.
    """

    def __init__(self, file: str, encoding: str | None, begins: bytes = b"") -> None:
        self.file, self.asked = file, encoding
        self.encoding = encoding or ("utf-16" if begins.startswith(UTF16) else None)
        self._num_other, self._num_cut, self._has_utf8 = 0, 0, False
        self._example, self._is_judged = "", False

    @property
    def recodes(self) -> bool:
        """True where all bytes are read in another encoding than UTF-8."""
        return self.encoding is not None and codecs.lookup(self.encoding).name != "utf-8"

    def recoded(self, reads: Iterable[bytes]) -> Iterator[bytes]:
        """Bytes of the file as UTF-8. Raises: DataError for bytes that the encoding does not have."""
        assert self.encoding is not None
        decoder, num_bytes = codecs.getincrementaldecoder(self.encoding)("strict"), 0
        for data in _with_end(reads):
            try:
                text = decoder.decode(data or b"", final=data is None)
            except UnicodeError as error:
                at = num_bytes + getattr(error, "start", 0)
                said = f"is not {self.encoding}: it does not have the byte at offset {at:,}"
                raise DataError(said, file=self.file, hint=f"--encoding names another: {_SOME}") from error
            num_bytes += len(data or b"")
            if text:
                yield text.encode("utf-8", "surrogatepass")

    def utf8(self, data: bytes) -> bytes:
        """Whole lines as UTF-8; unchanged where the user says that they are. Counts what was not.

        Raises: DataError for the first lines of a file that are in no western encoding.
        """
        if self.encoding is not None or data.isascii():
            return data
        try:
            data.decode()
        except UnicodeDecodeError:
            pass
        else:
            self._has_utf8, self._is_judged = True, True
            return data
        text = data.decode("utf-8", "surrogateescape")
        self._look(text)
        if self._has_utf8:
            text, num_cut = _CUT.subn("\ufffd", text)
            self._num_cut += num_cut
        return text.translate(_WINDOWS).encode()

    def _look(self, text: str) -> None:
        """Count what is not UTF-8, and keep an example of it."""
        others, num_utf8 = len(text) - len(_NOT_UTF8.sub("", text)), len(text) - len(_UTF8.sub("", text))
        self._has_utf8 = self._has_utf8 or num_utf8 > 0
        if not self._is_judged and others >= _MANY_BYTES:
            self._is_judged = True
            share = others / (others + sum(map(str.isalpha, text)))
            if others > num_utf8 and share > _MANY_SHARE:
                raise DataError(
                    f"is not UTF-8, and {share:.0%} of its letters are not ASCII: too many for windows-1252",
                    file=self.file,
                    hint=f"name its encoding: --encoding {_SOME}",
                )
        self._num_other += others
        if not self._example and (found := _NOT_UTF8.search(text)):
            word = re.compile(r"[^\s,;\"]*").match
            begin = max(text.rfind(mark, 0, found.start()) for mark in ' \n\r\t,;"') + 1
            self._example = word(text, begin, begin + 40)[0].translate(_WINDOWS)  # type: ignore[index]

    def note(self) -> str | None:
        """One line about the encoding, None where there is nothing to say."""
        if self.asked is None and self.encoding is not None:
            return f"{printable(self.file)}: read as {self.encoding}, by its byte-order mark"
        if not self._num_other:
            return None
        noun = "byte is" if self._num_other == 1 else "bytes are"
        how = "and read as windows-1252" if self._has_utf8 else "so it is read as windows-1252"
        said = f"{printable(self.file)}: {self._num_other:,} {noun} not UTF-8, {how} ('{printable(self._example, 40)}')"
        cut = f"; {self._num_cut:,} characters are cut in the middle, and read as U+FFFD" if self._num_cut else ""
        return f"{said}{cut}; --encoding names another"


def decoded_text(data: bytes, file: str, encoding: str | None) -> tuple[str, str | None]:
    """The text of a whole file, and a note about its encoding, if any. Raises: DataError as `TextDecoder` does."""
    decoder = TextDecoder(file, encoding, data)
    if decoder.recodes:
        return b"".join(decoder.recoded([data])).decode("utf-8").removeprefix("\ufeff"), decoder.note()
    if encoding is not None:
        return data.decode("utf-8-sig"), None
    return decoder.utf8(data.removeprefix(BOM)).decode(), decoder.note()


def _with_end(reads: Iterable[bytes]) -> Iterator[bytes | None]:
    yield from reads
    yield None
