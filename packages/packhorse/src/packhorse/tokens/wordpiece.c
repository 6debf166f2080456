/* BERT's tokenizer for ASCII text: blanks and punctuation end words, WordPiece divides words.

A vocabulary is a trie in two arrays of the caller. An edge (node, byte) -> node is found by hashing,
with open addressing; `tokens[node]` is the id of the word that ends at a node, or -1. Words begin at
node 0 and continuations, without their prefix, at node 1. */

#include <stdint.h>

#define FIRST 0
#define CONTINUATION 1
#define NO_EDGE -1

typedef struct {
    int32_t key; /* node * 256 + byte; -1: free */
    int32_t child;
} edge;

static inline edge *find(edge *edges, int64_t mask, int32_t node, uint8_t byte) {
    int32_t key = node * 256 + byte;
    /* Multiplying spreads keys over the high bits, which the shift brings down. */
    uint64_t slot = ((uint64_t)key * 0x9e3779b97f4a7c15u) >> 20;
    while (edges[slot & mask].key != key && edges[slot & mask].key != NO_EDGE)
        slot++;
    return &edges[slot & mask];
}

/* Add words, end to end in `text`, to a trie of `nodes` nodes; return how many nodes it has then.
   The caller has filled `edges` and `tokens` with -1 and made room for a node per byte. */
int32_t packhorse_wordpiece_add(const uint8_t *text, const int64_t *ends, const int32_t *ids,
                                int64_t words, int32_t root, int32_t nodes, edge *edges,
                                int64_t mask, int32_t *tokens) {
    int64_t at = 0;
    for (int64_t word = 0; word < words; word++) {
        int32_t node = root;
        for (; at < ends[word]; at++) {
            edge *found = find(edges, mask, node, text[at]);
            if (found->key == NO_EDGE) {
                found->key = node * 256 + text[at];
                found->child = nodes++;
            }
            node = found->child;
        }
        if (node != root)
            tokens[node] = ids[word];
    }
    return nodes;
}

static inline int is_blank(uint8_t c) {
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static inline int is_punctuation(uint8_t c) {
    return (c >= 33 && c <= 47) || (c >= 58 && c <= 64) || (c >= 91 && c <= 96) ||
           (c >= 123 && c <= 126);
}

/* Tokenize texts, end to end in `text`. Tokens of all texts are written to `ids` and `offsets`, which
   have room for a token per byte; `counts` gets the tokens of each text, or -1 if the text has a byte
   that is not ASCII or is a control character: these need more rules than there are here. */
void packhorse_wordpiece(const uint8_t *text, const int64_t *ends, int64_t texts, edge *edges,
                         int64_t mask, const int32_t *tokens, int32_t unknown, int64_t longest_word,
                         int lowercase, int32_t *ids, int32_t *offsets, int64_t *counts) {
    int64_t begin = 0;
    for (int64_t number = 0; number < texts; number++) {
        int64_t end = ends[number], at = begin, count = 0;
        while (at < end && count >= 0) {
            uint8_t c = text[at];
            if (is_blank(c)) {
                at++;
                continue;
            }
            int64_t word_end = at + 1;
            if (!is_punctuation(c))
                while (word_end < end && !is_blank(text[word_end]) &&
                       !is_punctuation(text[word_end]))
                    word_end++;
            int64_t before = count, piece = at;
            int is_unknown = word_end - at > longest_word;
            for (int64_t i = at; i < word_end; i++)
                if (text[i] < 32 || text[i] >= 127)
                    count = -1;
            while (count >= 0 && !is_unknown && piece < word_end) {
                int64_t piece_end = 0;
                int32_t node = piece == at ? FIRST : CONTINUATION, id = -1;
                for (int64_t i = piece; i < word_end; i++) {
                    uint8_t byte = text[i];
                    if (lowercase && byte >= 'A' && byte <= 'Z')
                        byte += 'a' - 'A';
                    edge *found = find(edges, mask, node, byte);
                    if (found->key == NO_EDGE)
                        break;
                    node = found->child;
                    if (tokens[node] >= 0) { /* the longest piece wins */
                        id = tokens[node];
                        piece_end = i + 1;
                    }
                }
                is_unknown = id < 0;
                if (!is_unknown) {
                    ids[count] = id;
                    offsets[2 * count] = (int32_t)(piece - begin);
                    offsets[2 * count + 1] = (int32_t)(piece_end - begin);
                    count++;
                    piece = piece_end;
                }
            }
            if (count >= 0 && is_unknown) { /* the whole word, whatever pieces were found */
                count = before;
                ids[count] = unknown;
                offsets[2 * count] = (int32_t)(at - begin);
                offsets[2 * count + 1] = (int32_t)(word_end - begin);
                count++;
            }
            at = word_end;
        }
        counts[number] = count;
        if (count > 0) {
            ids += count;
            offsets += 2 * count;
        }
        begin = end;
    }
}
