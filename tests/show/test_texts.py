"""Numbers as they read."""

from fxpipe.show.texts import bytes_text, ms_text


def test_units_read_well():
    assert [bytes_text(n) for n in (0, 1023, 1536, 2**20, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5120.00 GiB",
    ]
    assert [ms_text(ms) for ms in (0.012, 9.99, 12.34, 1234.5, 12345)] == [
        "0.01 ms",
        "9.99 ms",
        "12.3 ms",
        "1234 ms",
        "12.3 s",
    ]
